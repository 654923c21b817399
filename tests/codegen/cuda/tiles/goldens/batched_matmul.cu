__device__ inline void multiply_m16n8k16_row_col_f32_f16_f16_f32(f32* c, const unsigned* a, const unsigned* b) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ inline void load_matrices_4(unsigned* into, unsigned from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(into[0]), "=r"(into[1]), "=r"(into[2]), "=r"(into[3]) : "r"(from) : "memory");
}
__device__ inline void load_matrices_4_transposed(unsigned* into, unsigned from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(into[0]), "=r"(into[1]), "=r"(into[2]), "=r"(into[3]) : "r"(from) : "memory");
}
extern "C" __global__ void __launch_bounds__(128) KERNEL_NAME(f16* p1, f16* p2, f32* p3, i32 p4, i32 p5, i32 p6) {
  const int t = threadIdx.x;
  extern __shared__ __align__(128) unsigned char shared[];
  const unsigned smem = shared_address(shared);
  i32 const v7 = (i32)blockIdx.z;
  i32 const v8 = (i32)blockIdx.x;
  i32 const v9 = i32(u32(v8) * u32(i32(32)));
  i32 const v10 = (i32)blockIdx.y;
  i32 const v11 = i32(u32(v10) * u32(i32(32)));
  f32 v13[8];
#pragma unroll
  for (int r = 0; r < 8; ++r) v13[r] = 0.0f;
  f32 v12[8];
#pragma unroll
  for (int r = 0; r < 8; ++r) v12[r] = v13[r];
  #pragma unroll 1
for (i64 n14 = i32(0); n14 < p6; n14 += i32(32)) {
    const i32 v15 = (i32)n14;
    i32 const v16 = i32(u32(v7) * u32(p4));
    i32 const v17 = i32(u32(v16) * u32(p6));
    f16* const v18 = (p1 + (i64)(v17));
    i32 const v19 = i32(u32(v7) * u32(p6));
    i32 const v20 = i32(u32(v19) * u32(p5));
    f16* const v21 = (p2 + (i64)(v20));
    i32 v22[1];
#pragma unroll
    for (int r = 0; r < 1; ++r) v22[r] = (t >> 2 & 31);
    i32 v23[1];
#pragma unroll
    for (int r = 0; r < 1; ++r) v23[r] = i32(u32(v9) + u32(v22[r]));
    i32 v24[1];
#pragma unroll
    for (int r = 0; r < 1; ++r) v24[r] = i32(u32(v23[r]) * u32(p6));
    f16* v25[1];
#pragma unroll
    for (int r = 0; r < 1; ++r) v25[r] = (v18 + (i64)(v24[r]));
    f16* v26[8];
#pragma unroll
    for (int r = 0; r < 8; ++r) v26[r] = v25[0];
    i32 v27[8];
#pragma unroll
    for (int r = 0; r < 8; ++r) v27[r] = (t & 3) * 8 + (r & 7);
    i32 v28[8];
#pragma unroll
    for (int r = 0; r < 8; ++r) v28[r] = i32(u32(v15) + u32(v27[r]));
    f16* v29[8];
#pragma unroll
    for (int r = 0; r < 8; ++r) v29[r] = (v26[r] + (i64)(v28[r]));
    bool v30[1];
#pragma unroll
    for (int r = 0; r < 1; ++r) v30[r] = (v23[r] < p4);
    bool v31[8];
#pragma unroll
    for (int r = 0; r < 8; ++r) v31[r] = v30[0];
    bool v32[8];
#pragma unroll
    for (int r = 0; r < 8; ++r) v32[r] = (v28[r] < p6);
    bool v33[8];
#pragma unroll
    for (int r = 0; r < 8; ++r) v33[r] = (v31[r] && v32[r]);
    f16 v34[8];
#pragma unroll
    for (int r = 0; r < 8; ++r) v34[r] = narrow<f16>(0.0f);
    f16 v35[8];
#pragma unroll
    for (int r = 0; r < 8; r += 8) {
      if (v33[r]) {
        get_global<8>(v35 + r, v29[r]);
      } else {
#pragma unroll
        for (int e = 0; e < 8; ++e) v35[r + e] = v34[r + e];
      }
    }
    i32 v36[1];
#pragma unroll
    for (int r = 0; r < 1; ++r) v36[r] = (t >> 2 & 31);
    i32 v37[1];
#pragma unroll
    for (int r = 0; r < 1; ++r) v37[r] = i32(u32(v15) + u32(v36[r]));
    i32 v38[1];
#pragma unroll
    for (int r = 0; r < 1; ++r) v38[r] = i32(u32(v37[r]) * u32(p5));
    f16* v39[1];
#pragma unroll
    for (int r = 0; r < 1; ++r) v39[r] = (v21 + (i64)(v38[r]));
    f16* v40[8];
#pragma unroll
    for (int r = 0; r < 8; ++r) v40[r] = v39[0];
    i32 v41[8];
#pragma unroll
    for (int r = 0; r < 8; ++r) v41[r] = (t & 3) * 8 + (r & 7);
    i32 v42[8];
#pragma unroll
    for (int r = 0; r < 8; ++r) v42[r] = i32(u32(v11) + u32(v41[r]));
    f16* v43[8];
#pragma unroll
    for (int r = 0; r < 8; ++r) v43[r] = (v40[r] + (i64)(v42[r]));
    bool v44[1];
#pragma unroll
    for (int r = 0; r < 1; ++r) v44[r] = (v37[r] < p6);
    bool v45[8];
#pragma unroll
    for (int r = 0; r < 8; ++r) v45[r] = v44[0];
    bool v46[8];
#pragma unroll
    for (int r = 0; r < 8; ++r) v46[r] = (v42[r] < p5);
    bool v47[8];
#pragma unroll
    for (int r = 0; r < 8; ++r) v47[r] = (v45[r] && v46[r]);
    f16 v48[8];
#pragma unroll
    for (int r = 0; r < 8; ++r) v48[r] = narrow<f16>(0.0f);
    f16 v49[8];
#pragma unroll
    for (int r = 0; r < 8; r += 8) {
      if (v47[r]) {
        get_global<8>(v49 + r, v43[r]);
      } else {
#pragma unroll
        for (int e = 0; e < 8; ++e) v49[r + e] = v48[r + e];
      }
    }
    f32 v50[8];
#pragma unroll
    for (int r = 0; r < 8; ++r) v50[r] = v12[r];
    __syncthreads();
#pragma unroll
    for (int r = 0; r < 8; r += 8) put_shared<8>(smem + 0 + (((t & 7) * 16 ^ (t >> 3 & 3) * 144 ^ (t >> 5 & 3) * 512) ^ (r & 7) * 2), v35 + r);
#pragma unroll
    for (int r = 0; r < 8; r += 8) put_shared<8>(smem + 2048 + (((t & 7) * 16 ^ (t >> 3 & 3) * 144 ^ (t >> 5 & 3) * 512) ^ (r & 7) * 2), v49 + r);
    __syncthreads();
#pragma unroll
    for (int z = 0; z < 1; ++z)
#pragma unroll
    for (int k = 0; k < 2; ++k) {
    unsigned a[1][4], b[2][2];
#pragma unroll
    for (int i = 0; i < 1; ++i) load_matrices_4(a[i], smem + 0 + (((t & 1) * 64 ^ (t >> 1 & 3) * 144 ^ (t >> 3 & 1) * 512 ^ (t >> 4 & 1) * 16 ^ (t >> 5 & 1) * 1024) ^ (k & 1) * 32));
#pragma unroll
    for (int j = 0; j < 2; j += 2) load_matrices_4_transposed(b[j], smem + 2048 + (((t & 1) * 64 ^ (t >> 1 & 3) * 144 ^ (t >> 3 & 1) * 512 ^ (t >> 4 & 1) * 16 ^ (t >> 6 & 1) * 32) ^ (k & 1) * 1024 ^ (j & 1) * 16));
#pragma unroll
    for (int i = 0; i < 1; ++i)
#pragma unroll
    for (int j = 0; j < 2; ++j) multiply_m16n8k16_row_col_f32_f16_f16_f32(v50 + 4 * (j + 2 * (i + 1 * z)), a[i], b[j]);
    }
    #pragma unroll
    for (int r = 0; r < 8; ++r) v12[r] = v50[r];
  }
  i32 const v53 = i32(u32(v7) * u32(p4));
  i32 const v54 = i32(u32(v53) * u32(p5));
  f32* const v55 = (p3 + (i64)(v54));
  i32 v56[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) v56[r] = ((t >> 2 & 7) ^ (t >> 5 & 1) * 16) + (r & 1) * 8;
  i32 v57[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) v57[r] = i32(u32(v9) + u32(v56[r]));
  i32 v58[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) v58[r] = i32(u32(v57[r]) * u32(p5));
  f32* v59[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) v59[r] = (v55 + (i64)(v58[r]));
  f32* v60[8];
#pragma unroll
  for (int r = 0; r < 8; ++r) v60[r] = v59[(r >> 1 & 1)];
  i32 v61[4];
#pragma unroll
  for (int r = 0; r < 4; ++r) v61[r] = ((t & 3) * 2 ^ (t >> 6 & 1) * 16) + ((r & 1) ^ (r >> 1 & 1) * 8);
  i32 v62[4];
#pragma unroll
  for (int r = 0; r < 4; ++r) v62[r] = i32(u32(v11) + u32(v61[r]));
  i32 v63[8];
#pragma unroll
  for (int r = 0; r < 8; ++r) v63[r] = v62[((r & 1) ^ (r >> 2 & 1) * 2)];
  f32* v64[8];
#pragma unroll
  for (int r = 0; r < 8; ++r) v64[r] = (v60[r] + (i64)(v63[r]));
  bool v65[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) v65[r] = (v57[r] < p4);
  bool v66[8];
#pragma unroll
  for (int r = 0; r < 8; ++r) v66[r] = v65[(r >> 1 & 1)];
  bool v67[4];
#pragma unroll
  for (int r = 0; r < 4; ++r) v67[r] = (v62[r] < p5);
  bool v68[8];
#pragma unroll
  for (int r = 0; r < 8; ++r) v68[r] = v67[((r & 1) ^ (r >> 2 & 1) * 2)];
  bool v69[8];
#pragma unroll
  for (int r = 0; r < 8; ++r) v69[r] = (v66[r] && v68[r]);
#pragma unroll
  for (int r = 0; r < 8; r += 2) if (v69[r]) put_global<2>(v64[r], v12 + r);
}
