// tensor cores: 40 x 72 x 48 by 16 x 128 x 32, 1 x 2 warps, 2 stages, sum of 72 columns
// 3 blocks of 64 threads, 18432 bytes of shared memory
// prelude.cuh
// tensor_cores.cuh
// matmul.cuh
extern "C" __global__ void __launch_bounds__(64) KERNEL_NAME(const f16* __restrict__ x0, const f16* __restrict__ x1, const f16* __restrict__ x2, f32* __restrict__ out) {
  extern __shared__ __align__(128) unsigned char shared[];
  await_turn();
  const int tile = blockIdx.x / 1 % 3;
  const int group = tile / 8 * 8;
  const int height = min(3 - group, 8);
  const int m0 = (group + tile % 8 % height) * 16;
  const int n0 = tile % 8 / height * 72;
  Matrix<f16, 16, 32, false, true, 8, 64, 48, false> a(x0 + 0, m0, 0, 40, 48);
  Matrix<f16, 128, 32, true, false, 8, 64, 72, false> b(x1 + 0, n0, 0, 72, 48);
  using P = Product<f16, 16, 128, 32, 1, 2, 2, Matrix<f16, 16, 32, false, true, 8, 64, 48, false>, Matrix<f16, 128, 32, true, false, 8, 64, 72, false>>;
  f32* const sums = reinterpret_cast<P::Total*>(shared);
  P::begin(shared, a, b);
  P::finish(shared, sums, a, b, 2, [] {});
  __syncthreads();
  const int part = n0 / 72, own = threadIdx.x % 8;
  for (int first = 0; first < 16; first += 8) {
    const int sum_row = first + threadIdx.x / 8, place_m = m0 + sum_row;
    f32 total[8];
    {
#pragma unroll
      for (int v = 0; v < 8; ++v) {
        total[v] = 0.0f;
      }
    }
    if (place_m < 40) {
      for (int sum_vector = own; sum_vector < 9; sum_vector += 8) {
        const int place_n = n0 / 8 + sum_vector;
        {
          const Pack<f32, 8> x_1 = *reinterpret_cast<const Pack<f32, 8>*>(sums + ((sum_row * 136) + (sum_vector * 8)));
          const Pack<f16, 8> x_2 = *reinterpret_cast<const Pack<f16, 8>*>(x2 + (place_n * 8));
#pragma unroll
          for (int v = 0; v < 8; ++v) {
            total[v] = (total[v] + maximum((x_1.at[v] + wide(x_2.at[v])), 0.0f));
          }
        }
      }
    }
#pragma unroll
    for (int v = 1; v < 8; ++v) total[0] = Sum()(total[0], total[v]);
    total[0] = combined<8, Sum>(total[0]);
    if (own == 0 && place_m < 40) {
      out[((place_m * 1) + 0)] = total[0];
    }
  }
}
