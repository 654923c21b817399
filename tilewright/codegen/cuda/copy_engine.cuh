// What kernels for sm_90a use beyond earlier ones: matrix instructions of warpgroups, the tensor copy engine and its
// barriers, and roles of a block's threads. Shared memory is accessed by address.

// Multiplications of warpgroups: they read what ordinary stores and copies have written only behind this fence.
__device__ inline void fence_for_warpgroups() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ inline void begin_multiplications() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void commit_multiplications() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
__device__ inline u64 matrix_descriptor(unsigned address, u64 form) { return (address & 0x3ffff) >> 4 | form; }

// The tensor copy engine: what it copies from, and barriers that count arrivals and bytes. A wait is for the end of the
// phase with this parity; the one before the first has parity 1.
struct alignas(64) TensorMap {
  unsigned char at[128];
};
__device__ inline void prefetch_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}
__device__ inline void begin_barrier(unsigned barrier, unsigned arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ inline void end_barrier(unsigned barrier) {
  asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
__device__ inline void fence_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ inline void expect_bytes(unsigned barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ inline void arrive(unsigned barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ inline void await_phase(unsigned barrier, unsigned parity) {
  unsigned done;
  do {
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.b32 %0, 1, 0, p;\n}\n"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
  } while (!done);
}
__device__ inline void await_multiplications_but_one() { asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory"); }

// Threads that share the registers of a multiprocessor otherwise than they began: each warpgroup of a role says it once.
template <int COUNT>
__device__ inline void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
__device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
// Blocks of a cluster copy to each other: a barrier of all their threads, the block's number in its cluster, and an
// arrival at the same barrier of another block.
__device__ inline void meet_blocks() {
  asm volatile("barrier.cluster.arrive;\nbarrier.cluster.wait;" ::: "memory");
}
__device__ inline unsigned rank_in_cluster() {
  unsigned rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ inline void arrive_in_block(unsigned barrier, unsigned block) {
  unsigned there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(barrier), "r"(block));
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(there) : "memory");
}
// A barrier of the first THREADS threads of a block.
template <int THREADS>
__device__ inline void meet_role() {
  asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory");
}
