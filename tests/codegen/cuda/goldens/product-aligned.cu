// tensor cores: 64 x 64 x 128 by 32 x 32 x 32, 1 x 2 warps, 3 stages
// 4 blocks of 64 threads, 12288 bytes of shared memory
// prelude.cuh
// tensor_cores.cuh
// matmul.cuh
extern "C" __global__ void __launch_bounds__(64) KERNEL_NAME(const f16* __restrict__ x0, const f16* __restrict__ x1, const f16* __restrict__ x2, const f16* __restrict__ x3, f16* __restrict__ out) {
  extern __shared__ __align__(128) unsigned char shared[];
  await_turn();
  const int tile = blockIdx.x / 1 % 4;
  const int group = tile / 16 * 8;
  const int height = min(2 - group, 8);
  const int m0 = (group + tile % 16 % height) * 32;
  const int n0 = tile % 16 / height * 32;
  Matrix<f16, 32, 32, false, true, 8, 64, 128, true> a(x0 + 0, m0, 0, 64, 128);
  Matrix<f16, 32, 32, false, false, 8, 64, 128, true> b(x1 + 0, n0, 0, 64, 128);
  using P = Product<f16, 32, 32, 32, 1, 2, 3, Matrix<f16, 32, 32, false, true, 8, 64, 128, true>, Matrix<f16, 32, 32, false, false, 8, 64, 128, true>>;
  f32* const sums = reinterpret_cast<P::Total*>(shared);
  P::begin(shared, a, b);
  P::finish(shared, sums, a, b, 4, [] {});
  __syncthreads();
#pragma unroll 2
  for (int turn = 0; turn < 2; ++turn) {
    const int i = turn * 64 + threadIdx.x;
    const int sum_row = i / 4;
    const int sum_vector = i % 4;
    const int place_m = m0 + sum_row, place_n = n0 / 8 + sum_vector;
    {
      {
        const Pack<f32, 8> x_1 = *reinterpret_cast<const Pack<f32, 8>*>(sums + ((sum_row * 40) + (sum_vector * 8)));
        const Pack<f16, 8> x_2 = *reinterpret_cast<const Pack<f16, 8>*>(x2 + (place_n * 8));
        const Pack<f16, 8> x_3 = *reinterpret_cast<const Pack<f16, 8>*>(x3 + ((place_m * 64) + (place_n * 8)));
        Pack<f16, 8> x_4;
#pragma unroll
        for (int v = 0; v < 8; ++v) {
          x_4.at[v] = narrow<f16>((maximum((x_1.at[v] + wide(x_2.at[v])), 0.0f) + wide(x_3.at[v])));
        }
        *reinterpret_cast<Pack<f16, 8>*>(out + ((place_m * 64) + (place_n * 8))) = x_4;
      }
    }
  }
}
