// A warp's sums to rows of `pitch` floats in shared memory. The warps of a block cover it, WARPS_N of them along n.
template <int WARPS_N, class Total, int MS, int NS>
__device__ inline void store_sums(Total* out, int pitch, const Total (&sums)[MS][NS][4]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int warp_m = warp / WARPS_N * MS * 16, warp_n = warp % WARPS_N * NS * 8;
#pragma unroll
  for (int i = 0; i < MS; ++i)
#pragma unroll
    for (int j = 0; j < NS; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = warp_m + i * 16 + half * 8 + lane / 4, column = warp_n + j * 8 + lane % 4 * 2;
        Pack<Total, 2> pair = {sums[i][j][2 * half], sums[i][j][2 * half + 1]};
        *reinterpret_cast<Pack<Total, 2>*>(out + row * pitch + column) = pair;
      }
}

// A block's tile of a GEMM, BM x BN, accumulated over `tiles` steps of BK; a pipeline of STAGES tiles in shared
// memory, WARPS_M x WARPS_N warps. The sums end up in shared memory as rows of BN + 8. `begin` asks for the first
// tiles and `finish` does the rest; when nothing reads the tiles any more it calls `after`, which may begin the next.
// `accumulate` leaves the sums in registers: of each warp MS x NS fragments of 16 x 16. Of the BN columns in shared memory
// only COLUMNS are multiplied, if one warp has them all.
template <class T, int BM, int BN, int BK, int WARPS_M, int WARPS_N, int STAGES, class A, class B, int COLUMNS = BN>
struct Product {
  static_assert(COLUMNS == BN || WARPS_N == 1, "the columns of a warp are a power of two, or all");
  static constexpr int WM = BM / WARPS_M, WN = COLUMNS / WARPS_N;
  static constexpr int MS = WM / 16, NS = WN / 16, STEPS = BK * sizeof(T) / 32;
  using Total = typename Accumulated<T>::type;
  static constexpr int PITCH = BN + 8;
  static constexpr int STAGE = A::BYTES + B::BYTES;

  __device__ static void begin(unsigned char* shared, A& a, B& b) {
    unsigned into = shared_address(shared);
    constexpr int AHEAD = A::HELD || B::HELD ? 1 : STAGES;  // what goes through registers goes one tile at a time
#pragma unroll AHEAD
    for (int tile = 0; tile < STAGES - 1; ++tile) {
      a.fetch(into, 0, 1);
      b.fetch(into + A::BYTES, 0, 1);
      a.finish(into);
      b.finish(into + A::BYTES);
      commit_copies();
      into += STAGE;
    }
  }

  // When this returns, no copy is under way and nothing reads the tiles any more.
  __device__ static void accumulate(unsigned char* shared, Total (&sums)[MS][NS * 2][4], A& a, B& b, int tiles) {
    const unsigned base = shared_address(shared), end = base + STAGES * STAGE;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const unsigned first_a = A::first(warp / WARPS_N * WM, lane), first_b = B::first(warp % WARPS_N * WN, lane);

#pragma unroll
    for (int i = 0; i < MS; ++i)
#pragma unroll
      for (int j = 0; j < NS * 2; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[i][j][e] = Total(0);

    unsigned into = end - STAGE, from = base;  // the stages that are written and read
    await_copies<STAGES - 2>();
    __syncthreads();

    // Fragments are read one step ahead, from the next tile at the end of one: the barrier lies behind multiplications.
    unsigned rows[2][MS][4], columns[2][NS][4];
#pragma unroll
    for (int i = 0; i < MS; ++i) A::read(rows[0][i], from, first_a, i, 0);
#pragma unroll
    for (int j = 0; j < NS; ++j) B::read(columns[0][j], from + A::BYTES, first_b, j, 0);
    constexpr int PARTS = STEPS - 1;  // the copies of a tile are spread over all steps but the last
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        const int now = step % 2, then = (step + 1) % 2, ahead = (step + 1) % STEPS;
        if (step < PARTS) {
          a.fetch(into, step, PARTS);
          b.fetch(into + A::BYTES, step, PARTS);
        } else {
          a.finish(into);
          b.finish(into + A::BYTES);
          commit_copies();
          await_copies<STAGES - 2>();
          __syncthreads();
          into = into + STAGE == end ? base : into + STAGE;
          from = from + STAGE == end ? base : from + STAGE;
        }
#pragma unroll
        for (int i = 0; i < MS; ++i) {
          A::read(rows[then][i], from, first_a, i, ahead);
#pragma unroll
          for (int j = NS * i / MS; j < NS * (i + 1) / MS; ++j) B::read(columns[then][j], from + A::BYTES, first_b, j, ahead);
#pragma unroll
          for (int j = 0; j < NS; ++j) {
            const int c = i % 2 ? NS - 1 - j : j;  // there and back: a fragment is used twice in a row
            multiply_add<T>(sums[i][2 * c], rows[now][i], columns[now][c][0], columns[now][c][1]);
            multiply_add<T>(sums[i][2 * c + 1], rows[now][i], columns[now][c][2], columns[now][c][3]);
          }
        }
      }
    }
    await_copies<0>();
    __syncthreads();
  }

  template <class After>
  __device__ static void finish(unsigned char* shared, Total* out, A& a, B& b, int tiles, After after) {
    Total sums[MS][NS * 2][4];
    accumulate(shared, sums, a, b, tiles);
    after();
    store_sums<WARPS_N>(out, PITCH, sums);
  }
};
