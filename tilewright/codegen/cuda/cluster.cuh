// Blocks of a cluster, from sm_90 on: they see each other's shared memory.

__device__ inline void meet_cluster() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// The same place of shared memory in another block, as an address.
__device__ inline unsigned in_block(const void* at, int block) {
  unsigned there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"((unsigned)__cvta_generic_to_shared(at)), "r"(block));
  return there;
}

// The combination of x over all threads of BLOCKS blocks of THREADS: in the order of warps, then of blocks. NUMBER is
// another one for each place where this is called: what others may still read is not written again. No block ends
// before `leave_cluster`.
template <int BLOCKS, int THREADS, int NUMBER, class Op, class T>
__device__ inline T combined(T x) {
  static_assert(sizeof(T) == 4, "what blocks exchange has four bytes");
  __shared__ T of_block;
  x = combined<THREADS, Op>(x);
  if (threadIdx.x == 0) of_block = x;
  meet_cluster();
  const Op op;
  T total;
#pragma unroll
  for (int block = 0; block < BLOCKS; ++block) {
    unsigned bits;
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(bits) : "r"(in_block(&of_block, block)) : "memory");
    const T other = reinterpret_cast<const T&>(bits);
    total = block ? op(total, other) : other;
  }
  return total;
}

// Nothing of another block is read any more; and the wait until that holds for all.
__device__ inline void leave_cluster() { asm volatile("barrier.cluster.arrive.aligned;" ::: "memory"); }
__device__ inline void end_cluster() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

__device__ inline Pack<f32, 4> from_block(const void* at, int block) {
  Pack<f32, 4> found;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(found.at[0]), "=f"(found.at[1]), "=f"(found.at[2]), "=f"(found.at[3])
               : "r"(in_block(at, block))
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
    Pack<f32, 4> total = from_block(at, 0);
#pragma unroll
    for (int block = 1; block < PARTS; ++block) {
      const Pack<f32, 4> more = from_block(at, block);
#pragma unroll
      for (int e = 0; e < 4; ++e) total.at[e] += more.at[e];
    }
    *reinterpret_cast<Pack<f32, 4>*>(at) = total;
  }
  meet_cluster();
}
