__device__ inline void copy_box(unsigned to, const TensorMap& map, int column, int row, unsigned barrier) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
    :: "r"(to), "l"(&map), "r"(column), "r"(row), "r"(barrier) : "memory");
}

__device__ inline void multiply_m64n64k16_f32_f16_f16_b(float* c, unsigned long long a, unsigned long long b, int adds) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
    "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, p, 1, 1, 0, 1;\n}\n"
    : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]), "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]), "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31]) : "l"(a), "l"(b), "r"(adds));
}

__device__ inline void await_multiplications_64(float* c) {
  asm volatile("wgmma.wait_group.sync.aligned 0;" : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]), "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]), "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31]), "+f"(c[32]), "+f"(c[33]), "+f"(c[34]), "+f"(c[35]), "+f"(c[36]), "+f"(c[37]), "+f"(c[38]), "+f"(c[39]), "+f"(c[40]), "+f"(c[41]), "+f"(c[42]), "+f"(c[43]), "+f"(c[44]), "+f"(c[45]), "+f"(c[46]), "+f"(c[47]), "+f"(c[48]), "+f"(c[49]), "+f"(c[50]), "+f"(c[51]), "+f"(c[52]), "+f"(c[53]), "+f"(c[54]), "+f"(c[55]), "+f"(c[56]), "+f"(c[57]), "+f"(c[58]), "+f"(c[59]), "+f"(c[60]), "+f"(c[61]), "+f"(c[62]), "+f"(c[63]) :: "memory");
}

extern "C" __global__ void __launch_bounds__(128) KERNEL_NAME(f16* p1, f16* p2, f16* p3, f16* p4, i32 p5, i32 p6, i32 p7, const __grid_constant__ TensorMap map0, const __grid_constant__ TensorMap map1) {
  const int t = threadIdx.x;
  extern __shared__ __align__(1024) unsigned char shared[];
  const unsigned smem = shared_address(shared);
  if (t == 0) { prefetch_map(map0); prefetch_map(map1); }
  const int warp = __shfl_sync(0xffffffffu, t >> 5, 0);
  i32 const v8 = (i32)blockIdx.x;
  i32 const v9 = i32(u32(v8) * u32(i32(128)));
  i32 const v10 = (i32)blockIdx.y;
  i32 const v11 = i32(u32(v10) * u32(i32(64)));
  i64 const v12 = i64(p5);
  i64 const v13 = i64(p7);
  i64 const v14 = i64(p7);
  i64 const v15 = i64(i32(1));
  i64 const v16 = i64(v9);
  i64 const v17 = i64(i32(0));
  const i64 v18 = (i64)(v12);
  const i64 v19 = (i64)(v13);
  const i64 v20 = (i64)(v14);
  const i64 v21 = (i64)(v15);
  const i64 v22 = (i64)(v16);
  const i64 v23 = (i64)(v17);
  i64 const v24 = i64(p7);
  i64 const v25 = i64(p6);
  i64 const v26 = i64(p6);
  i64 const v27 = i64(i32(1));
  i64 const v28 = i64(i32(0));
  i64 const v29 = i64(v11);
  const i64 v30 = (i64)(v24);
  const i64 v31 = (i64)(v25);
  const i64 v32 = (i64)(v26);
  const i64 v33 = (i64)(v27);
  const i64 v34 = (i64)(v28);
  const i64 v35 = (i64)(v29);
  i32 const v36 = i32(u32(i32(64)) - u32(i32(1)));
  i32 const v37 = i32(u32(p7) + u32(v36));
  i32 const v38 = floor_div<i32>(v37, i32(64));
  f32 v40[64];
#pragma unroll
  for (int r = 0; r < 64; ++r) v40[r] = 0.0f;
  f32 v39[64];
#pragma unroll
  for (int r = 0; r < 64; ++r) v39[r] = v40[r];
  f16* v41;
  i64 v42;
  i64 v43;
  i64 v44;
  i64 v45;
  i64 v46;
  i64 v47;
  v41 = p1;
  v42 = v18;
  v43 = v19;
  v44 = v20;
  v45 = v21;
  v46 = v22;
  v47 = v23;
  f16* v48;
  i64 v49;
  i64 v50;
  i64 v51;
  i64 v52;
  i64 v53;
  i64 v54;
  v48 = p2;
  v49 = v30;
  v50 = v31;
  v51 = v32;
  v52 = v33;
  v53 = v34;
  v54 = v35;
  f16* v60;
  i64 v61;
  i64 v62;
  i64 v63;
  i64 v64;
  i64 v65;
  i64 v66;
  v60 = p1;
  v61 = v18;
  v62 = v19;
  v63 = v20;
  v64 = v21;
  v65 = v22;
  v66 = v23;
  f16* v67;
  i64 v68;
  i64 v69;
  i64 v70;
  i64 v71;
  i64 v72;
  i64 v73;
  v67 = p2;
  v68 = v30;
  v69 = v31;
  v70 = v32;
  v71 = v33;
  v72 = v34;
  v73 = v35;
  i64 ahead74 = i32(0);
  int slot75 = 0;
  int phase57 = 0;
  bool started58 = false;
  fence_for_warpgroups();
  __syncthreads();
  if (t == 0) {
    for (int s = 0; s < 4; ++s) {
      begin_barrier(smem + 98304 + 8 * s, 1);
      begin_barrier(smem + 98304 + 8 * s + 32, 4);
    }
    fence_barriers();
  }
  __syncthreads();
  #pragma unroll 1
for (int s = 0; s < 3; ++s) {
    if (ahead74 < v38) {
      const i32 v76 = (i32)ahead74;
      i64 const v77 = i64(i32(0));
      i64 const v78 = i64(i32(64));
      const i64 v79 = v65 + (i64)(v77);
      const i64 v80 = v66 + (i64)(v78);
      i64 const v81 = i64(i32(64));
      i64 const v82 = i64(i32(0));
      const i64 v83 = v72 + (i64)(v81);
      const i64 v84 = v73 + (i64)(v82);
      if (t == 0) {
        expect_bytes(smem + 98304 + 8 * s, 24576);
        copy_box(smem + 0 + s * 16384 + 0, map0, (int)v66 + 0, (int)v65, smem + 98304 + 8 * s);
        copy_box(smem + 65536 + s * 8192 + 0, map1, (int)v73 + 0, (int)v72, smem + 98304 + 8 * s);
      }
      v65 = v79;
      v66 = v80;
      v72 = v83;
      v73 = v84;
    }
    __syncwarp();
    ahead74 += i32(1);
  }
  #pragma unroll 1
for (i64 n85 = i32(0); n85 < v38; n85 += i32(1)) {
    const i32 v86 = (i32)n85;
    await_phase(smem + 98304 + 8 * slot75, phase57);
    const int free87 = slot75 ? slot75 - 1 : 3;
    {
    const u64 a = matrix_descriptor(smem + 0 + slot75 * 16384, 4611686293372403712ull);
    const u64 b = matrix_descriptor(smem + 65536 + slot75 * 8192, 4611686293338849280ull);
    begin_multiplications();
#pragma unroll
    for (int z = 0; z < 1; ++z)
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int j = 0; j < 1; ++j)
#pragma unroll
    for (int k = 0; k < 4; ++k)
      multiply_m64n64k16_f32_f16_f16_b(v39 + 32 * (j + 1 * (i + 2 * z)), a + (k & 3) * 2 + (i & 1) * 512, b + (k & 3) * 128, 1);
    commit_multiplications();
    }
    await_multiplications_but_one();
    if (started58 && (t & 31) == 0) arrive(smem + 98304 + 8 * free87 + 32);
    started58 = true;
    if (ahead74 < v38) {
      const i32 v88 = (i32)ahead74;
      i64 const v89 = i64(i32(0));
      i64 const v90 = i64(i32(64));
      const i64 v91 = v65 + (i64)(v89);
      const i64 v92 = v66 + (i64)(v90);
      i64 const v93 = i64(i32(64));
      i64 const v94 = i64(i32(0));
      const i64 v95 = v72 + (i64)(v93);
      const i64 v96 = v73 + (i64)(v94);
      if (t == 0) {
        await_phase(smem + 98304 + 8 * free87 + 32, slot75 ? phase57 : phase57 ^ 1);
        expect_bytes(smem + 98304 + 8 * free87, 24576);
        copy_box(smem + 0 + free87 * 16384 + 0, map0, (int)v66 + 0, (int)v65, smem + 98304 + 8 * free87);
        copy_box(smem + 65536 + free87 * 8192 + 0, map1, (int)v73 + 0, (int)v72, smem + 98304 + 8 * free87);
      }
      v65 = v91;
      v66 = v92;
      v72 = v95;
      v73 = v96;
    }
    __syncwarp();
    ahead74 += i32(1);
    i64 const v97 = i64(i32(0));
    i64 const v98 = i64(i32(64));
    const i64 v99 = v46 + (i64)(v97);
    const i64 v100 = v47 + (i64)(v98);
    i64 const v101 = i64(i32(64));
    i64 const v102 = i64(i32(0));
    const i64 v103 = v53 + (i64)(v101);
    const i64 v104 = v54 + (i64)(v102);
    v46 = v99;
    v47 = v100;
    v53 = v103;
    v54 = v104;
    slot75 = slot75 + 1 == 4 ? 0 : slot75 + 1;
    if (slot75 == 0) phase57 ^= 1;
  }
  await_multiplications_64(v39);
  __syncthreads();
  if (t == 0)
    for (int s = 0; s < 8; ++s)
      end_barrier(smem + 98304 + 8 * s);
  i32 v105[16];
#pragma unroll
  for (int r = 0; r < 16; ++r) v105[r] = (t & 3) * 2 + ((r & 1) ^ (r >> 1 & 7) * 8);
  i32 v106[16];
#pragma unroll
  for (int r = 0; r < 16; ++r) v106[r] = i32(u32(v11) + u32(v105[r]));
  f16* v107[16];
#pragma unroll
  for (int r = 0; r < 16; ++r) v107[r] = (p3 + (i64)(v106[r]));
  bool v108[16];
#pragma unroll
  for (int r = 0; r < 16; ++r) v108[r] = (v106[r] < p6);
  f16 v109[16];
#pragma unroll
  for (int r = 0; r < 16; ++r) v109[r] = narrow<f16>(0.0f);
  f16 v110[16];
#pragma unroll
  for (int r = 0; r < 16; r += 2) {
    if (v108[r]) {
      get_global<2>(v110 + r, v107[r]);
    } else {
#pragma unroll
      for (int e = 0; e < 2; ++e) v110[r + e] = v109[r + e];
    }
  }
  f32 v111[16];
#pragma unroll
  for (int r = 0; r < 16; ++r) v111[r] = wide(v110[r]);
  f32 v112[64];
#pragma unroll
  for (int r = 0; r < 64; ++r) v112[r] = v111[((r & 1) ^ (r >> 2 & 7) * 2)];
  f32 v113[64];
#pragma unroll
  for (int r = 0; r < 64; ++r) v113[r] = (v39[r] + v112[r]);
  i64 const v114 = i64(p5);
  i64 const v115 = i64(p6);
  i64 const v116 = i64(p6);
  i64 const v117 = i64(i32(1));
  i64 const v118 = i64(v9);
  i64 const v119 = i64(v11);
  const i64 v120 = (i64)(v114);
  const i64 v121 = (i64)(v115);
  const i64 v122 = (i64)(v116);
  const i64 v123 = (i64)(v117);
  const i64 v124 = (i64)(v118);
  const i64 v125 = (i64)(v119);
  f32 v126[64];
#pragma unroll
  for (int r = 0; r < 64; ++r) v126[r] = (0.5f * v113[r]);
  f32 v127[64];
#pragma unroll
  for (int r = 0; r < 64; ++r) v127[r] = (v113[r] * 0.707106769f);
  f32 v128[64];
#pragma unroll
  for (int r = 0; r < 64; ++r) v128[r] = erff(v127[r]);
  f32 v129[64];
#pragma unroll
  for (int r = 0; r < 64; ++r) v129[r] = (1.0f + v128[r]);
  f32 v130[64];
#pragma unroll
  for (int r = 0; r < 64; ++r) v130[r] = (v126[r] * v129[r]);
  f16 v131[64];
#pragma unroll
  for (int r = 0; r < 64; ++r) v131[r] = narrow<f16>(v130[r]);
  __syncthreads();
#pragma unroll
  for (int r = 0; r < 64; r += 2) put_shared<2>(smem + 0 + (((t & 3) * 4 ^ (t >> 2 & 1) * 192 ^ (t >> 3 & 1) * 288 ^ (t >> 4 & 1) * 528 ^ (t >> 5 & 3) * 2048) ^ ((r & 1) * 2 ^ (r >> 1 & 1) * 1024 ^ (r >> 2 & 7) * 16 ^ (r >> 5 & 1) * 8192)), v131 + r);
  __syncthreads();
  f16 v133[64];
#pragma unroll
  for (int r = 0; r < 64; r += 8) get_shared<8>(v133 + r, smem + 0 + (((t & 7) * 16 ^ (t >> 3 & 1) * 192 ^ (t >> 4 & 1) * 288 ^ (t >> 5 & 1) * 528 ^ (t >> 6 & 1) * 1024) ^ ((r & 7) * 2 ^ (r >> 3 & 7) * 2048)));
  f16* v134[64];
  bool v135[64];
#pragma unroll
  for (int r = 0; r < 64; ++r) {
    const i64 n136 = v124 + ((t >> 3 & 15) + (r >> 3 & 7) * 16);
    const i64 n137 = v125 + ((t & 7) * 8 + (r & 7));
    v134[r] = p4 + n136 * v122 + n137 * v123;
    v135[r] = n136 >= 0 && n136 < v120 && n137 >= 0 && n137 < v121;
  }
#pragma unroll
  for (int r = 0; r < 64; r += 8) if (v135[r]) put_global<8>(v134[r], v133 + r);
}
