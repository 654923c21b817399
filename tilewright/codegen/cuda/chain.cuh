// Products in a chain: the sums of one, after what `between` makes of them, are the left operand of the next, whose right
// operand B lies in shared memory as a whole. `between(low, high, row, column)` are two neighbours as one word.

// In registers: two neighbouring fragments of sums, 16 x 8 each, are one of the left operand, 16 x 16. A warp has all
// columns of its rows.
template <int STEPS, int MS, int NS, class Between>
__device__ inline void keep_left(unsigned (&left)[MS][STEPS][4], const f32 (&sums)[MS][NS][4], int m0, const Between& between) {
  const int lane = threadIdx.x % 32, first = m0 + threadIdx.x / 32 * MS * 16 + lane / 4;
#pragma unroll
  for (int i = 0; i < MS; ++i)
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
#pragma unroll
      for (int part = 0; part < 4; ++part) {
        const f32* const pair = &sums[i][2 * step + part / 2][part % 2 * 2];
        left[i][step][part] = between(pair[0], pair[1], first + i * 16 + part % 2 * 8, step * 16 + part / 2 * 8 + lane % 4 * 2);
      }
}

// In shared memory, as a tile of BM x COLUMNS elements from `at` on. The warps of a block cover it, WARPS_N along n.
template <int BM, int COLUMNS, int WARPS_N, int MS, int NS, class Between>
__device__ inline void share_left(unsigned at, const f32 (&sums)[MS][NS][4], int m0, const Between& between) {
  using Layout = Tile<BM, COLUMNS>;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int warp_m = warp / WARPS_N * MS * 16, warp_n = warp % WARPS_N * NS * 8;
#pragma unroll
  for (int i = 0; i < MS; ++i)
#pragma unroll
    for (int j = 0; j < NS; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = warp_m + i * 16 + half * 8 + lane / 4, column = warp_n + j * 8 + lane % 4 * 2;
        store_shared(at + Layout::of(row, column), between(sums[i][j][2 * half], sums[i][j][2 * half + 1], m0 + row, column));
      }
}

// A left operand in registers times B, from `at` on.
template <class T, class B, int MS, int STEPS, int NS>
__device__ inline void multiply_kept(f32 (&sums)[MS][NS][4], const unsigned (&left)[MS][STEPS][4], unsigned at) {
  const unsigned first = B::first(0, threadIdx.x % 32);
#pragma unroll
  for (int i = 0; i < MS; ++i)
#pragma unroll
    for (int j = 0; j < NS; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[i][j][e] = 0.0f;
#pragma unroll
  for (int step = 0; step < STEPS; ++step)
#pragma unroll
    for (int j = 0; j < NS / 2; ++j) {
      unsigned columns[4];
      B::read(columns, at, first, j, step);
#pragma unroll
      for (int i = 0; i < MS; ++i) {
        multiply_add<T>(sums[i][2 * j], left[i][step], columns[0], columns[1]);
        multiply_add<T>(sums[i][2 * j + 1], left[i][step], columns[2], columns[3]);
      }
    }
}

// A left operand in shared memory, BM x K elements from `left` on, of which STEPS x 16 columns count, times B.
template <class T, class B, int BM, int K, int STEPS, int WARPS_N, int MS, int NS>
__device__ inline void multiply_shared(f32 (&sums)[MS][NS][4], unsigned left, unsigned at) {
  using Left = Fragments<BM, K, false, true>;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const unsigned first_a = Left::first(warp / WARPS_N * MS * 16, lane), first_b = B::first(warp % WARPS_N * NS * 8, lane);
#pragma unroll
  for (int i = 0; i < MS; ++i)
#pragma unroll
    for (int j = 0; j < NS; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[i][j][e] = 0.0f;
#pragma unroll 4
  for (int step = 0; step < STEPS; ++step) {
    unsigned rows[MS][4];
#pragma unroll
    for (int i = 0; i < MS; ++i) Left::read(rows[i], left, first_a, i, step);
#pragma unroll
    for (int j = 0; j < NS / 2; ++j) {
      unsigned columns[4];
      B::read(columns, at, first_b, j, step);
#pragma unroll
      for (int i = 0; i < MS; ++i) {
        multiply_add<T>(sums[i][2 * j], rows[i], columns[0], columns[1]);
        multiply_add<T>(sums[i][2 * j + 1], rows[i], columns[2], columns[3]);
      }
    }
  }
}
