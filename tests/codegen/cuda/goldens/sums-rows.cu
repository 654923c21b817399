// tensor cores: 70 x 50 x 64 by 128 x 32 x 32, 2 x 1 warps, 2 stages, sum of 70 rows
// 2 blocks of 64 threads, 20480 bytes of shared memory
// prelude.cuh
// tensor_cores.cuh
// matmul.cuh
extern "C" __global__ void __launch_bounds__(64, 1) KERNEL_NAME(const f16* __restrict__ x0, const f16* __restrict__ x1, const f16* __restrict__ x2, f32* __restrict__ out) {
  extern __shared__ __align__(128) unsigned char shared[];
  await_turn();
  const int tile = blockIdx.x / 1 % 2;
  const int group = tile / 16 * 8;
  const int height = min(1 - group, 8);
  const int m0 = (group + tile % 16 % height) * 70;
  const int n0 = tile % 16 / height * 32;
  Matrix<f16, 128, 32, false, true, 8, 64, 64, false> a(x0 + 0, m0, 0, 70, 64);
  Matrix<f16, 32, 32, true, false, 2, 64, 50, false> b(x1 + 0, n0, 0, 50, 64);
  using P = Product<f16, 128, 32, 32, 2, 1, 2, Matrix<f16, 128, 32, false, true, 8, 64, 64, false>, Matrix<f16, 32, 32, true, false, 2, 64, 50, false>>;
  f32* const sums = reinterpret_cast<P::Total*>(shared);
  P::begin(shared, a, b);
  P::finish(shared, sums, a, b, 2, [] {});
  __syncthreads();
  f32* const parts = reinterpret_cast<f32*>(shared);
  const int part = m0 / 70, own = threadIdx.x / 16;
  for (int first = 0; first < 16; first += 16) {
    const int sum_vector = first + threadIdx.x % 16, place_n = n0 / 2 + sum_vector;
    f32 total[2];
    {
#pragma unroll
      for (int v = 0; v < 2; ++v) {
        total[v] = 0.0f;
      }
    }
    for (int sum_row = own; sum_row < 70; sum_row += 4) {
      const int place_m = m0 + sum_row;
      if (place_n < 25) {
        {
          const Pack<f32, 2> x_1 = *reinterpret_cast<const Pack<f32, 2>*>(sums + ((sum_row * 40) + (sum_vector * 2)));
          const Pack<f16, 2> x_2 = *reinterpret_cast<const Pack<f16, 2>*>(x2 + (place_n * 2));
#pragma unroll
          for (int v = 0; v < 2; ++v) {
            const f32 x_4 = (x_1.at[v] + wide(x_2.at[v]));
            total[v] = (total[v] + ((0.5f * x_4) * (1.0f + erff((x_4 * 0.707106769f)))));
          }
        }
      }
    }
    __syncthreads();
#pragma unroll
    for (int v = 0; v < 2; ++v) parts[threadIdx.x * 2 + v] = total[v];
    __syncthreads();
    for (int group = 1; group < 4; ++group) {
      const int other = (group * 16 + threadIdx.x % 16) * 2;
      if (own == 0) {
        {
#pragma unroll
          for (int v = 0; v < 2; ++v) {
            total[v] = (total[v] + parts[(other + v)]);
          }
        }
      }
    }
    if (own == 0 && place_n < 25) {
      {
        Pack<f32, 2> x_1;
#pragma unroll
        for (int v = 0; v < 2; ++v) {
          x_1.at[v] = total[v];
        }
        *reinterpret_cast<Pack<f32, 2>*>(out + (place_n * 2)) = x_1;
      }
    }
  }
}
