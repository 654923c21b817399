// chain on tensor cores: 84 x 24 x 144 then 84 x 40 x 24 by 32 rows, steps of 32, 2 x 1 warps, 3 stages, intermediate results in registers
// 3 blocks of 64 threads, 16640 bytes of shared memory
// prelude.cuh
// tensor_cores.cuh
// matmul.cuh
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

struct Window {
  __device__ static int row(int place_m) { return (((((place_m / 42) * 672) + (((place_m / 7) % 6) * 112)) + ((place_m % 7) * 16)) + -128); }
  __device__ static unsigned seen(int place_m) {
    return true ? 1u << 31 | ((0 <= (((place_m / 7) % 6) + -1)) ? 1u : 0u) | (true ? 2u : 0u) | (((((place_m / 7) % 6) + 1) < 6) ? 4u : 0u) | ((0 <= ((place_m % 7) + -1)) ? 8u : 0u) | (true ? 16u : 0u) | ((((place_m % 7) + 1) < 7) ? 32u : 0u) : 0u;
  }
  __device__ static int k_offset(int place_k) { return ((((place_k / 48) * 112) + (((place_k / 16) % 3) * 16)) + (place_k % 16)); }
  __device__ static unsigned needed(int place_k) { return 1u << 31 | 1u << ((place_k / 48)) | 1u << ((((place_k / 16) % 3) + 3)); }
};
extern "C" __global__ void __launch_bounds__(64) KERNEL_NAME(const f16* __restrict__ x0, const f16* __restrict__ x1, const f16* __restrict__ x2, const f16* __restrict__ x3, const f16* __restrict__ x4, f16* __restrict__ out) {
  extern __shared__ __align__(128) unsigned char shared[];
  await_turn();
  const int m0 = blockIdx.x * 32, n0 = 0;
  using P = Product<f16, 32, 32, 32, 2, 1, 3, Gathered<f16, 32, 32, 8, 64, Window>, Matrix<f16, 32, 32, true, false, 8, 64, 24, false>>;
  f32* const sums = reinterpret_cast<f32*>(shared + 0);
  const auto between0 = [&](f32 low, f32 high, int row, int column) {
    const int place_m = min(row, 83);
    f32 both[2] = {0.0f, 0.0f};
#pragma unroll
    for (int e = 0; e < 2; e += 2) {
      const int place_n = column / 2;
      const f32 sum[2] = {low, high};
      f32 value[2];
      if (column + e < 24) {
        {
          const Pack<f16, 2> x_1 = *reinterpret_cast<const Pack<f16, 2>*>(x2 + (place_n * 2));
#pragma unroll
          for (int v = 0; v < 2; ++v) {
            value[v] = maximum((sum[v] + wide(x_1.at[v])), 0.0f);
          }
        }
        for (int v = 0; v < 2; ++v) both[e + v] = value[v];
      }
    }
    return packed<f16>(both[0], both[1]);
  };
  Gathered<f16, 32, 32, 8, 64, Window> a(shared + 16384, x0 + 0, m0, 0, 84, 144);
  Matrix<f16, 32, 32, true, false, 8, 64, 24, false> b(x1 + 0, n0, 0, 24, 144);
  P::begin(shared, a, b);
  const unsigned at_weight0 = shared_address(shared + 12288);
  Matrix<f16, 64, 32, true, false, 8, 64, 40, false> weight0(x3 + 0, 0, 0, 40, 24);
  weight0.fetch(at_weight0, 0, 1);
  weight0.finish(at_weight0);
  f32 sums0[P::MS][P::NS * 2][4];
  P::accumulate(shared, sums0, a, b, 5);
  f32 sums1[1][6][4];
  unsigned left0[1][2][4];
  keep_left(left0, sums0, m0, between0);
  multiply_kept<f16, decltype(weight0)>(sums1, left0, at_weight0);
  store_sums<1>(sums, 56, sums1);
  __syncthreads();
#pragma unroll 3
  for (int turn = 0; turn < 3; ++turn) {
    const int i = turn * 64 + threadIdx.x;
    const int sum_row = i / 6;
    const int sum_vector = i % 6;
    const int place_m = m0 + sum_row, place_n = n0 / 8 + sum_vector;
    if (place_m < 84 && place_n < 5) {
      {
        const Pack<f32, 8> x_1 = *reinterpret_cast<const Pack<f32, 8>*>(sums + ((sum_row * 56) + (sum_vector * 8)));
        const Pack<f16, 8> x_2 = *reinterpret_cast<const Pack<f16, 8>*>(x4 + (place_n * 8));
        Pack<f16, 8> x_3;
#pragma unroll
        for (int v = 0; v < 8; ++v) {
          x_3.at[v] = narrow<f16>(maximum((x_1.at[v] + wide(x_2.at[v])), 0.0f));
        }
        *reinterpret_cast<Pack<f16, 8>*>(out + ((place_m * 40) + (place_n * 8))) = x_3;
      }
    }
  }
}
