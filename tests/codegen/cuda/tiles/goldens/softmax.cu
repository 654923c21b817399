extern "C" __global__ void __launch_bounds__(128) KERNEL_NAME(f32* p1, f32* p2, i32 p3, i32 p4) {
  const int t = threadIdx.x;
  extern __shared__ __align__(1024) unsigned char shared[];
  const unsigned smem = shared_address(shared);
  i32 const v5 = (i32)blockIdx.x;
  i32 const v6 = i32(u32(v5) * u32(p3));
  f32* const v7 = (p1 + (i64)(v6));
  i32 v8[4];
#pragma unroll
  for (int r = 0; r < 4; ++r) v8[r] = (t & 127) * 4 + (r & 3);
  f32* v9[4];
#pragma unroll
  for (int r = 0; r < 4; ++r) v9[r] = (v7 + (i64)(v8[r]));
  bool v10[4];
#pragma unroll
  for (int r = 0; r < 4; ++r) v10[r] = (v8[r] < p4);
  f32 v11[4];
#pragma unroll
  for (int r = 0; r < 4; ++r) v11[r] = __int_as_float(0xff800000);
  f32 v12[4];
#pragma unroll
  for (int r = 0; r < 4; r += 4) {
    if (v10[r]) {
      get_global<4>(v12 + r, v9[r]);
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) v12[r + e] = v11[r + e];
    }
  }
  f32 v13[1];
#pragma unroll
  for (int q = 0; q < 1; ++q) {
#pragma unroll
    for (int a = 0; a < 4; ++a) {
      const int r = 0 + (a & 3);
      const f32 x = v12[r];
      if (a == 0) { v13[q] = x; }
      else v13[q] = maximum(v13[q], x);
    }
  }
#pragma unroll
  for (int q = 0; q < 1; ++q) {
    const f32 x = other_lane(v13[q], 1);
    v13[q] = maximum(v13[q], x);
  }
#pragma unroll
  for (int q = 0; q < 1; ++q) {
    const f32 x = other_lane(v13[q], 2);
    v13[q] = maximum(v13[q], x);
  }
#pragma unroll
  for (int q = 0; q < 1; ++q) {
    const f32 x = other_lane(v13[q], 4);
    v13[q] = maximum(v13[q], x);
  }
#pragma unroll
  for (int q = 0; q < 1; ++q) {
    const f32 x = other_lane(v13[q], 8);
    v13[q] = maximum(v13[q], x);
  }
#pragma unroll
  for (int q = 0; q < 1; ++q) {
    const f32 x = other_lane(v13[q], 16);
    v13[q] = maximum(v13[q], x);
  }
  if ((t & 31) == 0) {
#pragma unroll
  for (int q = 0; q < 1; ++q) put_shared<1>(smem + 0 + ((t >> 5 & 3) * 4 ^ 0), v13 + q);
  }
  __syncthreads();
#pragma unroll
  for (int q = 0; q < 1; ++q) {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      f32 x;
      get_shared<1>(&x, smem + 0 + (0 ^ 0) + w * 4);
      if (w == 0) { v13[q] = x; }
      else v13[q] = maximum(v13[q], x);
    }
  }
  f32 v16[4];
#pragma unroll
  for (int r = 0; r < 4; ++r) v16[r] = (v12[r] - v13[0]);
  f32 v17[4];
#pragma unroll
  for (int r = 0; r < 4; ++r) v17[r] = exponential(v16[r]);
  i32 const v18 = i32(u32(v5) * u32(p3));
  f32* const v19 = (p2 + (i64)(v18));
  f32 v20[1];
#pragma unroll
  for (int q = 0; q < 1; ++q) {
#pragma unroll
    for (int a = 0; a < 4; ++a) {
      const int r = 0 + (a & 3);
      const f32 x = v17[r];
      if (a == 0) { v20[q] = x; }
      else v20[q] = (v20[q] + x);
    }
  }
#pragma unroll
  for (int q = 0; q < 1; ++q) {
    const f32 x = other_lane(v20[q], 1);
    v20[q] = (v20[q] + x);
  }
#pragma unroll
  for (int q = 0; q < 1; ++q) {
    const f32 x = other_lane(v20[q], 2);
    v20[q] = (v20[q] + x);
  }
#pragma unroll
  for (int q = 0; q < 1; ++q) {
    const f32 x = other_lane(v20[q], 4);
    v20[q] = (v20[q] + x);
  }
#pragma unroll
  for (int q = 0; q < 1; ++q) {
    const f32 x = other_lane(v20[q], 8);
    v20[q] = (v20[q] + x);
  }
#pragma unroll
  for (int q = 0; q < 1; ++q) {
    const f32 x = other_lane(v20[q], 16);
    v20[q] = (v20[q] + x);
  }
  __syncthreads();
  if ((t & 31) == 0) {
#pragma unroll
  for (int q = 0; q < 1; ++q) put_shared<1>(smem + 0 + ((t >> 5 & 3) * 4 ^ 0), v20 + q);
  }
  __syncthreads();
#pragma unroll
  for (int q = 0; q < 1; ++q) {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      f32 x;
      get_shared<1>(&x, smem + 0 + (0 ^ 0) + w * 4);
      if (w == 0) { v20[q] = x; }
      else v20[q] = (v20[q] + x);
    }
  }
  f32 v23[4];
#pragma unroll
  for (int r = 0; r < 4; ++r) v23[r] = (v17[r] / v20[0]);
  f32* v24[4];
#pragma unroll
  for (int r = 0; r < 4; ++r) v24[r] = (v19 + (i64)(v8[r]));
  bool v25[4];
#pragma unroll
  for (int r = 0; r < 4; ++r) v25[r] = (v8[r] < p4);
#pragma unroll
  for (int r = 0; r < 4; r += 4) if (v25[r]) put_global<4>(v24[r], v23 + r);
}
