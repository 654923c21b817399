// attention on tensor cores: 6 heads, 33 queries, 47 keys, by 32 x 32, 2 warps, 2 stages
// 12 blocks of 64 threads, 20480 bytes of shared memory
// prelude.cuh
// tensor_cores.cuh
// attention.cuh
extern "C" __global__ void __launch_bounds__(64) KERNEL_NAME(const f16* __restrict__ x0, const f16* __restrict__ x1, const f16* __restrict__ x2, const f16* __restrict__ x3, f16* __restrict__ out) {
  extern __shared__ __align__(128) unsigned char shared[];
  await_turn();
  const int m0 = (blockIdx.x % 2) * 32, n0 = 0;
  const int batch = blockIdx.x / 2;
  const int b1 = (batch % 3);
  const int b0 = (batch / 3);
  Matrix<f16, 64, 32, true, false, 8, 64, 40, false> q(x0 + ((b0 * 3960) + (b1 * 1320)), 0, m0, 40, 33);
  Matrix<f16, 64, 32, true, false, 8, 64, 40, false> k(x1 + ((b0 * 5640) + (b1 * 1880)), 0, 0, 40, 47);
  Matrix<f16, 64, 32, true, false, 8, 64, 40, false> v(x2 + ((b0 * 5640) + (b1 * 1880)), 0, 0, 40, 47);
  const auto mask = [&](f32 value, int place_m, int place_k) {
    const f32 score[1] = {value};
    f32 masked[1];
    masked[0] = (score[0] + (wide(x3[(((b0 * 1551) + (place_m * 47)) + place_k)]) * 1.44269502f));
    return masked[0];
  };
  Attention<f16, 2, 1, 32, 64, 64, 2, false, false, decltype(q), decltype(k), decltype(v)>::run(shared, q, k, v, m0, 33, 47, 0.22811011491194377f, mask);
  f32* const sums = reinterpret_cast<f32*>(shared);
  __syncthreads();
#pragma unroll 4
  for (int turn = 0; turn < 4; ++turn) {
    const int i = turn * 64 + threadIdx.x;
    const int sum_row = i / 8;
    const int sum_vector = i % 8;
    const int place_m = m0 + sum_row, place_n = n0 / 8 + sum_vector;
    if (place_m < 33 && place_n < 5) {
      {
        const Pack<f32, 8> x_1 = *reinterpret_cast<const Pack<f32, 8>*>(sums + ((sum_row * 72) + (sum_vector * 8)));
        Pack<f16, 8> x_2;
#pragma unroll
        for (int v = 0; v < 8; ++v) {
          x_2.at[v] = narrow<f16>(x_1.at[v]);
        }
        *reinterpret_cast<Pack<f16, 8>*>(out + ((((b0 * 3960) + (b1 * 1320)) + (place_m * 40)) + (place_n * 8))) = x_2;
      }
    }
  }
}
