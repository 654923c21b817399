// A block's tile of a matrix product, BM x BN, accumulated over the whole depth; a pipeline of STAGES tiles in shared
// memory, WARPS_M x WARPS_N warps. The sums end up in shared memory as rows of BN + PAD floats.
template <class T, int BM, int BN, int BK, int WARPS_M, int WARPS_N, int STAGES, bool TURNED_A, bool TURNED_B, int LANES_A,
          int LANES_B>
struct Product {
  static constexpr int THREADS = WARPS_M * WARPS_N * 32;
  static constexpr int WM = BM / WARPS_M, WN = BN / WARPS_N;
  static constexpr int MS = WM / 16, NS = WN / 16;
  static constexpr int PITCH = BN + 8;
  using A = Operand<T, BM, BK, TURNED_A, LANES_A, THREADS>;
  using B = Operand<T, BN, BK, TURNED_B, LANES_B, THREADS>;
  static constexpr int STAGE = A::BYTES + B::BYTES;

  __device__ static void run(unsigned char* shared, const T* a, const T* b, i64 pitch_a, i64 pitch_b, int m0, int n0,
                             int m, int n, int k) {
    const unsigned base = shared_address(shared);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int warp_m = warp / WARPS_N * WM, warp_n = warp % WARPS_N * WN;
    const int tiles = (k + BK - 1) / BK;

    auto fetch = [&](int tile) {
      if (tile < tiles) {
        const unsigned to = base + tile % STAGES * STAGE;
        A::fetch(to, a, pitch_a, TURNED_A ? tile * BK : m0, TURNED_A ? m0 : tile * BK, TURNED_A ? k : m,
                 TURNED_A ? m : k);
        B::fetch(to + A::BYTES, b, pitch_b, TURNED_B ? tile * BK : n0, TURNED_B ? n0 : tile * BK,
                 TURNED_B ? k : n, TURNED_B ? n : k);
      }
      commit_copies();
    };

    f32 sums[MS][NS * 2][4];
#pragma unroll
    for (int i = 0; i < MS; ++i)
#pragma unroll
      for (int j = 0; j < NS * 2; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[i][j][e] = 0.0f;

    // Fragments are read one step ahead, from the next tile at the end of one: the barrier lies behind multiplications.
    constexpr int STEPS = BK / 16;
    unsigned rows[2][MS][4], columns[2][NS][4];
    auto read = [&](int half, int tile, int step) {
      const unsigned at_a = base + tile % STAGES * STAGE, at_b = at_a + A::BYTES;
#pragma unroll
      for (int i = 0; i < MS; ++i) A::fragment_rows(rows[half][i], at_a, warp_m + i * 16, step * 16, lane);
#pragma unroll
      for (int j = 0; j < NS; ++j) B::fragment_columns(columns[half][j], at_b, warp_n + j * 16, step * 16, lane);
    };
    for (int tile = 0; tile < STAGES - 1; ++tile) fetch(tile);
    await_copies<STAGES - 2>();
    __syncthreads();
    read(0, 0, 0);
    for (int tile = 0; tile < tiles; ++tile) {
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        if (step == STEPS - 1) {
          await_copies<STAGES - 2>();
          __syncthreads();
          read((step + 1) % 2, tile + 1, 0);  // behind the last tile: what is read is not used
        } else {
          read((step + 1) % 2, tile, step + 1);
        }
        if (step == 0) fetch(tile + STAGES - 1);
#pragma unroll
        for (int i = 0; i < MS; ++i)
#pragma unroll
          for (int j = 0; j < NS; ++j) {
            multiply_add<T>(sums[i][2 * j], rows[step % 2][i], columns[step % 2][j][0], columns[step % 2][j][1]);
            multiply_add<T>(sums[i][2 * j + 1], rows[step % 2][i], columns[step % 2][j][2], columns[step % 2][j][3]);
          }
      }
    }
    await_copies<0>();
    __syncthreads();
    f32* const out = reinterpret_cast<f32*>(shared);
#pragma unroll
    for (int i = 0; i < MS; ++i)
#pragma unroll
      for (int j = 0; j < NS * 2; ++j)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = warp_m + i * 16 + half * 8 + lane / 4, column = warp_n + j * 8 + lane % 4 * 2;
          Pack<f32, 2> pair = {sums[i][j][2 * half], sums[i][j][2 * half + 1]};
          *reinterpret_cast<Pack<f32, 2>*>(out + row * PITCH + column) = pair;
        }
    __syncthreads();
  }
};
