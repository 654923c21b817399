// chain on tensor cores: 150 x 32 x 96 then 150 x 40 x 32 by 32 rows, steps of 32, 2 x 1 warps, 3 stages, intermediate results in registers, tiles in turn
// 5 blocks of 64 threads, 23552 bytes of shared memory
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

extern "C" __global__ void __launch_bounds__(64) KERNEL_NAME(const f16* __restrict__ x0, const f16* __restrict__ x1, const f16* __restrict__ x2, const f16* __restrict__ x3, const f16* __restrict__ x4, const f16* __restrict__ x5, f16* __restrict__ out) {
  extern __shared__ __align__(128) unsigned char shared[];
  await_turn();
  const int n0 = 0;
  using P = Product<f16, 32, 32, 32, 2, 1, 3, Matrix<f16, 32, 32, false, true, 8, 64, 96, false>, Matrix<f16, 32, 32, false, false, 8, 64, 96, true>>;
  f32* const sums = reinterpret_cast<f32*>(shared + 12288);
  const auto between0 = [&](f32 low, f32 high, int row, int column) {
    const int place_m = min(row, 149);
    f32 both[2] = {0.0f, 0.0f};
#pragma unroll
    for (int e = 0; e < 2; e += 2) {
      const int place_n = column / 2;
      const f32 sum[2] = {low, high};
      f32 value[2];
      {
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
  const auto left = [&](int number) {
    const int m0 = number * 32;
    return Matrix<f16, 32, 32, false, true, 8, 64, 96, false>(x0 + 0, m0, 0, 150, 96);
  };
  const auto right = [&](int number) {
    const int m0 = number * 32;
    return Matrix<f16, 32, 32, false, false, 8, 64, 96, true>(x1 + 0, n0, 0, 32, 96);
  };
  int number = blockIdx.x;
  auto a = left(number);
  auto b = right(number);
  P::begin(shared, a, b);
  const unsigned at_weight0 = shared_address(shared + 19456);
  Matrix<f16, 64, 32, false, false, 8, 64, 32, false> weight0(x3 + 0, 0, 0, 40, 32);
  weight0.fetch(at_weight0, 0, 1);
  weight0.finish(at_weight0);
  while (true) {
  const int m0 = number * 32;
  number += gridDim.x;
  f32 sums0[P::MS][P::NS * 2][4];
  P::accumulate(shared, sums0, a, b, 3);
  if (number < 5) {
    a = left(number);
    b = right(number);
    P::begin(shared, a, b);
  }
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
    if (place_m < 150 && place_n < 5) {
      {
        const Pack<f32, 8> x_1 = *reinterpret_cast<const Pack<f32, 8>*>(sums + ((sum_row * 56) + (sum_vector * 8)));
        const Pack<f16, 8> x_2 = *reinterpret_cast<const Pack<f16, 8>*>(x4 + (place_n * 8));
        const Pack<f16, 8> x_3 = *reinterpret_cast<const Pack<f16, 8>*>(x5 + ((place_m * 40) + (place_n * 8)));
        Pack<f16, 8> x_4;
#pragma unroll
        for (int v = 0; v < 8; ++v) {
          const f32 x_5 = ((x_1.at[v] + wide(x_2.at[v])) + wide(x_3.at[v]));
          x_4.at[v] = narrow<f16>((x_5 / (1.0f + expf((-x_5)))));
        }
        *reinterpret_cast<Pack<f16, 8>*>(out + ((place_m * 40) + (place_n * 8))) = x_4;
      }
    }
  }
  if (number >= 5) break;
  }
}
