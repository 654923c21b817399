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
  extern __shared__ __align__(1024) unsigned char shared[];
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
  i64 ahead16 = i32(0);
  int slot17 = 0;
  __syncthreads();
  #pragma unroll 1
for (int s = 0; s < 2; ++s) {
    if (ahead16 < p6) {
      const i32 v18 = (i32)ahead16;
      i32 const v19 = i32(u32(v7) * u32(p4));
      i32 const v20 = i32(u32(v19) * u32(p6));
      f16* const v21 = (p1 + (i64)(v20));
      i32 const v22 = i32(u32(v7) * u32(p6));
      i32 const v23 = i32(u32(v22) * u32(p5));
      f16* const v24 = (p2 + (i64)(v23));
      i32 v25[1];
#pragma unroll
      for (int r = 0; r < 1; ++r) v25[r] = (t >> 2 & 31);
      i32 v26[1];
#pragma unroll
      for (int r = 0; r < 1; ++r) v26[r] = i32(u32(v9) + u32(v25[r]));
      i32 v27[1];
#pragma unroll
      for (int r = 0; r < 1; ++r) v27[r] = i32(u32(v26[r]) * u32(p6));
      f16* v28[1];
#pragma unroll
      for (int r = 0; r < 1; ++r) v28[r] = (v21 + (i64)(v27[r]));
      f16* v29[8];
#pragma unroll
      for (int r = 0; r < 8; ++r) v29[r] = v28[0];
      i32 v30[8];
#pragma unroll
      for (int r = 0; r < 8; ++r) v30[r] = (t & 3) * 8 + (r & 7);
      i32 v31[8];
#pragma unroll
      for (int r = 0; r < 8; ++r) v31[r] = i32(u32(v18) + u32(v30[r]));
      f16* v32[8];
#pragma unroll
      for (int r = 0; r < 8; ++r) v32[r] = (v29[r] + (i64)(v31[r]));
      bool v33[1];
#pragma unroll
      for (int r = 0; r < 1; ++r) v33[r] = (v26[r] < p4);
      bool v34[8];
#pragma unroll
      for (int r = 0; r < 8; ++r) v34[r] = v33[0];
      bool v35[8];
#pragma unroll
      for (int r = 0; r < 8; ++r) v35[r] = (v31[r] < p6);
      bool v36[8];
#pragma unroll
      for (int r = 0; r < 8; ++r) v36[r] = (v34[r] && v35[r]);
#pragma unroll
      for (int r = 0; r < 8; r += 8) copy_async<16>(smem + 0 + s * 2048 + (((t & 7) * 16 ^ (t >> 3 & 3) * 144 ^ (t >> 5 & 3) * 512) ^ (r & 7) * 2), v32[r], v36[r]);
      i32 v37[1];
#pragma unroll
      for (int r = 0; r < 1; ++r) v37[r] = (t >> 2 & 31);
      i32 v38[1];
#pragma unroll
      for (int r = 0; r < 1; ++r) v38[r] = i32(u32(v18) + u32(v37[r]));
      i32 v39[1];
#pragma unroll
      for (int r = 0; r < 1; ++r) v39[r] = i32(u32(v38[r]) * u32(p5));
      f16* v40[1];
#pragma unroll
      for (int r = 0; r < 1; ++r) v40[r] = (v24 + (i64)(v39[r]));
      f16* v41[8];
#pragma unroll
      for (int r = 0; r < 8; ++r) v41[r] = v40[0];
      i32 v42[8];
#pragma unroll
      for (int r = 0; r < 8; ++r) v42[r] = (t & 3) * 8 + (r & 7);
      i32 v43[8];
#pragma unroll
      for (int r = 0; r < 8; ++r) v43[r] = i32(u32(v11) + u32(v42[r]));
      f16* v44[8];
#pragma unroll
      for (int r = 0; r < 8; ++r) v44[r] = (v41[r] + (i64)(v43[r]));
      bool v45[1];
#pragma unroll
      for (int r = 0; r < 1; ++r) v45[r] = (v38[r] < p6);
      bool v46[8];
#pragma unroll
      for (int r = 0; r < 8; ++r) v46[r] = v45[0];
      bool v47[8];
#pragma unroll
      for (int r = 0; r < 8; ++r) v47[r] = (v43[r] < p5);
      bool v48[8];
#pragma unroll
      for (int r = 0; r < 8; ++r) v48[r] = (v46[r] && v47[r]);
#pragma unroll
      for (int r = 0; r < 8; r += 8) copy_async<16>(smem + 6144 + s * 2048 + (((t & 7) * 16 ^ (t >> 3 & 3) * 144 ^ (t >> 5 & 3) * 512) ^ (r & 7) * 2), v44[r], v48[r]);
    }
    commit_copies();
    ahead16 += i32(32);
  }
  #pragma unroll 1
for (i64 n49 = i32(0); n49 < p6; n49 += i32(32)) {
    const i32 v50 = (i32)n49;
    await_copies<1>();
    __syncthreads();
    const int free51 = slot17 ? slot17 - 1 : 2;
    if (ahead16 < p6) {
      const i32 v52 = (i32)ahead16;
      i32 const v53 = i32(u32(v7) * u32(p4));
      i32 const v54 = i32(u32(v53) * u32(p6));
      f16* const v55 = (p1 + (i64)(v54));
      i32 const v56 = i32(u32(v7) * u32(p6));
      i32 const v57 = i32(u32(v56) * u32(p5));
      f16* const v58 = (p2 + (i64)(v57));
      i32 v59[1];
#pragma unroll
      for (int r = 0; r < 1; ++r) v59[r] = (t >> 2 & 31);
      i32 v60[1];
#pragma unroll
      for (int r = 0; r < 1; ++r) v60[r] = i32(u32(v9) + u32(v59[r]));
      i32 v61[1];
#pragma unroll
      for (int r = 0; r < 1; ++r) v61[r] = i32(u32(v60[r]) * u32(p6));
      f16* v62[1];
#pragma unroll
      for (int r = 0; r < 1; ++r) v62[r] = (v55 + (i64)(v61[r]));
      f16* v63[8];
#pragma unroll
      for (int r = 0; r < 8; ++r) v63[r] = v62[0];
      i32 v64[8];
#pragma unroll
      for (int r = 0; r < 8; ++r) v64[r] = (t & 3) * 8 + (r & 7);
      i32 v65[8];
#pragma unroll
      for (int r = 0; r < 8; ++r) v65[r] = i32(u32(v52) + u32(v64[r]));
      f16* v66[8];
#pragma unroll
      for (int r = 0; r < 8; ++r) v66[r] = (v63[r] + (i64)(v65[r]));
      bool v67[1];
#pragma unroll
      for (int r = 0; r < 1; ++r) v67[r] = (v60[r] < p4);
      bool v68[8];
#pragma unroll
      for (int r = 0; r < 8; ++r) v68[r] = v67[0];
      bool v69[8];
#pragma unroll
      for (int r = 0; r < 8; ++r) v69[r] = (v65[r] < p6);
      bool v70[8];
#pragma unroll
      for (int r = 0; r < 8; ++r) v70[r] = (v68[r] && v69[r]);
#pragma unroll
      for (int r = 0; r < 8; r += 8) copy_async<16>(smem + 0 + free51 * 2048 + (((t & 7) * 16 ^ (t >> 3 & 3) * 144 ^ (t >> 5 & 3) * 512) ^ (r & 7) * 2), v66[r], v70[r]);
      i32 v71[1];
#pragma unroll
      for (int r = 0; r < 1; ++r) v71[r] = (t >> 2 & 31);
      i32 v72[1];
#pragma unroll
      for (int r = 0; r < 1; ++r) v72[r] = i32(u32(v52) + u32(v71[r]));
      i32 v73[1];
#pragma unroll
      for (int r = 0; r < 1; ++r) v73[r] = i32(u32(v72[r]) * u32(p5));
      f16* v74[1];
#pragma unroll
      for (int r = 0; r < 1; ++r) v74[r] = (v58 + (i64)(v73[r]));
      f16* v75[8];
#pragma unroll
      for (int r = 0; r < 8; ++r) v75[r] = v74[0];
      i32 v76[8];
#pragma unroll
      for (int r = 0; r < 8; ++r) v76[r] = (t & 3) * 8 + (r & 7);
      i32 v77[8];
#pragma unroll
      for (int r = 0; r < 8; ++r) v77[r] = i32(u32(v11) + u32(v76[r]));
      f16* v78[8];
#pragma unroll
      for (int r = 0; r < 8; ++r) v78[r] = (v75[r] + (i64)(v77[r]));
      bool v79[1];
#pragma unroll
      for (int r = 0; r < 1; ++r) v79[r] = (v72[r] < p6);
      bool v80[8];
#pragma unroll
      for (int r = 0; r < 8; ++r) v80[r] = v79[0];
      bool v81[8];
#pragma unroll
      for (int r = 0; r < 8; ++r) v81[r] = (v77[r] < p5);
      bool v82[8];
#pragma unroll
      for (int r = 0; r < 8; ++r) v82[r] = (v80[r] && v81[r]);
#pragma unroll
      for (int r = 0; r < 8; r += 8) copy_async<16>(smem + 6144 + free51 * 2048 + (((t & 7) * 16 ^ (t >> 3 & 3) * 144 ^ (t >> 5 & 3) * 512) ^ (r & 7) * 2), v78[r], v82[r]);
    }
    commit_copies();
    ahead16 += i32(32);
    i32 const v83 = i32(u32(v7) * u32(p4));
    i32 const v84 = i32(u32(v83) * u32(p6));
    f16* const v85 = (p1 + (i64)(v84));
    i32 const v86 = i32(u32(v7) * u32(p6));
    i32 const v87 = i32(u32(v86) * u32(p5));
    f16* const v88 = (p2 + (i64)(v87));
#pragma unroll
    for (int z = 0; z < 1; ++z)
#pragma unroll
    for (int k = 0; k < 2; ++k) {
    unsigned a[1][4], b[2][2];
#pragma unroll
    for (int i = 0; i < 1; ++i) load_matrices_4(a[i], smem + 0 + slot17 * 2048 + (((t & 1) * 64 ^ (t >> 1 & 3) * 144 ^ (t >> 3 & 1) * 512 ^ (t >> 4 & 1) * 16 ^ (t >> 5 & 1) * 1024) ^ (k & 1) * 32));
#pragma unroll
    for (int j = 0; j < 2; j += 2) load_matrices_4_transposed(b[j], smem + 6144 + slot17 * 2048 + (((t & 1) * 64 ^ (t >> 1 & 3) * 144 ^ (t >> 3 & 1) * 512 ^ (t >> 4 & 1) * 16 ^ (t >> 6 & 1) * 32) ^ (k & 1) * 1024 ^ (j & 1) * 16));
#pragma unroll
    for (int i = 0; i < 1; ++i)
#pragma unroll
    for (int j = 0; j < 2; ++j) multiply_m16n8k16_row_col_f32_f16_f16_f32(v12 + 4 * (j + 2 * (i + 1 * z)), a[i], b[j]);
    }
    slot17 = slot17 + 1 == 3 ? 0 : slot17 + 1;
  }
  await_copies<0>();
  i32 const v89 = i32(u32(v7) * u32(p4));
  i32 const v90 = i32(u32(v89) * u32(p5));
  f32* const v91 = (p3 + (i64)(v90));
  i32 v92[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) v92[r] = ((t >> 2 & 7) ^ (t >> 5 & 1) * 16) + (r & 1) * 8;
  i32 v93[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) v93[r] = i32(u32(v9) + u32(v92[r]));
  i32 v94[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) v94[r] = i32(u32(v93[r]) * u32(p5));
  f32* v95[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) v95[r] = (v91 + (i64)(v94[r]));
  f32* v96[8];
#pragma unroll
  for (int r = 0; r < 8; ++r) v96[r] = v95[(r >> 1 & 1)];
  i32 v97[4];
#pragma unroll
  for (int r = 0; r < 4; ++r) v97[r] = ((t & 3) * 2 ^ (t >> 6 & 1) * 16) + ((r & 1) ^ (r >> 1 & 1) * 8);
  i32 v98[4];
#pragma unroll
  for (int r = 0; r < 4; ++r) v98[r] = i32(u32(v11) + u32(v97[r]));
  i32 v99[8];
#pragma unroll
  for (int r = 0; r < 8; ++r) v99[r] = v98[((r & 1) ^ (r >> 2 & 1) * 2)];
  f32* v100[8];
#pragma unroll
  for (int r = 0; r < 8; ++r) v100[r] = (v96[r] + (i64)(v99[r]));
  bool v101[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) v101[r] = (v93[r] < p4);
  bool v102[8];
#pragma unroll
  for (int r = 0; r < 8; ++r) v102[r] = v101[(r >> 1 & 1)];
  bool v103[4];
#pragma unroll
  for (int r = 0; r < 4; ++r) v103[r] = (v98[r] < p5);
  bool v104[8];
#pragma unroll
  for (int r = 0; r < 8; ++r) v104[r] = v103[((r & 1) ^ (r >> 2 & 1) * 2)];
  bool v105[8];
#pragma unroll
  for (int r = 0; r < 8; ++r) v105[r] = (v102[r] && v104[r]);
#pragma unroll
  for (int r = 0; r < 8; r += 2) if (v105[r]) put_global<2>(v100[r], v12 + r);
}
