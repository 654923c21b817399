// attention on tensor cores: 6 heads, 40 queries, 72 keys, by 32 x 32, 2 warps, 2 stages
// 12 blocks of 64 threads, 10240 bytes of shared memory
// prelude.cuh
// tensor_cores.cuh
// attention.cuh
extern "C" __global__ void __launch_bounds__(64) KERNEL_NAME(const f16* __restrict__ x0, const f16* __restrict__ x1, const f16* __restrict__ x2, f16* __restrict__ out) {
  extern __shared__ __align__(128) unsigned char shared[];
  await_turn();
  const int m0 = (blockIdx.x % 2) * 32, n0 = 0;
  const int batch = blockIdx.x / 2;
  const int b1 = (batch % 3);
  const int b0 = (batch / 3);
  Matrix<f16, 32, 32, true, false, 8, 64, 32, true> q(x0 + ((b0 * 3840) + (b1 * 1280)), 0, m0, 32, 40);
  Matrix<f16, 32, 32, true, false, 8, 64, 32, true> k(x1 + ((b0 * 6912) + (b1 * 2304)), 0, 0, 32, 72);
  Matrix<f16, 32, 32, true, false, 8, 64, 32, true> v(x2 + ((b0 * 6912) + (b1 * 2304)), 0, 0, 32, 72);
  const auto mask = [&](f32 value, int place_m, int place_k) {
    return value;
  };
  Attention<f16, 2, 1, 32, 32, 32, 2, false, true, decltype(q), decltype(k), decltype(v)>::run(shared, q, k, v, m0, 40, 72, 0.25503486164919736f, mask);
  f32* const sums = reinterpret_cast<f32*>(shared);
  __syncthreads();
#pragma unroll 2
  for (int turn = 0; turn < 2; ++turn) {
    const int i = turn * 64 + threadIdx.x;
    const int sum_row = i / 4;
    const int sum_vector = i % 4;
    const int place_m = m0 + sum_row, place_n = n0 / 8 + sum_vector;
    if (place_m < 40) {
      {
        const Pack<f32, 8> x_1 = *reinterpret_cast<const Pack<f32, 8>*>(sums + ((sum_row * 40) + (sum_vector * 8)));
        Pack<f16, 8> x_2;
#pragma unroll
        for (int v = 0; v < 8; ++v) {
          x_2.at[v] = narrow<f16>(x_1.at[v]);
        }
        *reinterpret_cast<Pack<f16, 8>*>(out + ((((b0 * 3840) + (b1 * 1280)) + (place_m * 32)) + (place_n * 8))) = x_2;
      }
    }
  }
}
