// Blocks of a cluster, from sm_90 on: they see each other's shared memory.

__device__ inline void meet_cluster() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

__device__ inline Pack<f32, 4> from_block(unsigned at, int block) {
  unsigned there;
  Pack<f32, 4> found;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(block));
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(found.at[0]), "=f"(found.at[1]), "=f"(found.at[2]), "=f"(found.at[3])
               : "r"(there)
               : "memory");
  return found;
}

// Every block has its partial sums, ROWS x COLUMNS with rows PITCH apart. Block `part` adds up its share of the rows, in
// the order of the blocks, where its own were.
template <int PARTS, int ROWS, int COLUMNS, int PITCH, int THREADS>
__device__ inline void add_parts(f32* sums, int part) {
  constexpr int SHARE = ROWS / PARTS;
  meet_cluster();
  for (int i = threadIdx.x; i < SHARE * COLUMNS / 4; i += THREADS) {
    f32* const at = sums + (part * SHARE + i / (COLUMNS / 4)) * PITCH + i % (COLUMNS / 4) * 4;
    Pack<f32, 4> total = from_block(shared_address(at), 0);
#pragma unroll
    for (int block = 1; block < PARTS; ++block) {
      const Pack<f32, 4> more = from_block(shared_address(at), block);
#pragma unroll
      for (int e = 0; e < 4; ++e) total.at[e] += more.at[e];
    }
    *reinterpret_cast<Pack<f32, 4>*>(at) = total;
  }
  meet_cluster();
}
