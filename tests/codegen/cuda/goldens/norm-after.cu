// tensor cores: 40 x 72 x 64 by 32 x 128 x 32, 2 x 4 warps, 2 stages, a norm of the result's rows
// 2 blocks of 256 threads, 20480 bytes of shared memory
// prelude.cuh
// tensor_cores.cuh
// matmul.cuh
extern "C" __global__ void __launch_bounds__(256) KERNEL_NAME(const f16* __restrict__ x0, const f16* __restrict__ x1, const f16* __restrict__ x2, const f16* __restrict__ x3, const f16* __restrict__ x4, const f16* __restrict__ x5, f16* __restrict__ out) {
  extern __shared__ __align__(128) unsigned char shared[];
  await_turn();
  const int tile = blockIdx.x / 1 % 2;
  const int group = tile / 8 * 8;
  const int height = min(2 - group, 8);
  const int m0 = (group + tile % 8 % height) * 32;
  const int n0 = tile % 8 / height * 128;
  Matrix<f16, 32, 32, false, true, 8, 256, 64, false> a(x0 + 0, m0, 0, 40, 64);
  Matrix<f16, 128, 32, false, false, 8, 256, 64, false> b(x1 + 0, n0, 0, 72, 64);
  using P = Product<f16, 32, 128, 32, 2, 4, 2, Matrix<f16, 32, 32, false, true, 8, 256, 64, false>, Matrix<f16, 128, 32, false, false, 8, 256, 64, false>>;
  f32* const sums = reinterpret_cast<P::Total*>(shared);
  P::begin(shared, a, b);
  P::finish(shared, sums, a, b, 2, [] {});
  __syncthreads();
  for (int first_row = 0; first_row < 32; first_row += 32) {
    const int own = threadIdx.x % 8, sum_row = first_row + threadIdx.x / 8;
    const int place_m = m0 + sum_row;
    if (place_m < 40) {
      for (int sum_vector = own; sum_vector < 9; sum_vector += 8) {
        const int place_n = sum_vector;
        {
          const Pack<f32, 8> x_1 = *reinterpret_cast<const Pack<f32, 8>*>(sums + ((sum_row * 136) + (sum_vector * 8)));
          const Pack<f16, 8> x_2 = *reinterpret_cast<const Pack<f16, 8>*>(x2 + (place_n * 8));
          const Pack<f16, 8> x_3 = *reinterpret_cast<const Pack<f16, 8>*>(x3 + ((place_m * 72) + (place_n * 8)));
          Pack<f32, 8> x_4;
#pragma unroll
          for (int v = 0; v < 8; ++v) {
            x_4.at[v] = ((x_1.at[v] + wide(x_2.at[v])) + wide(x_3.at[v]));
          }
          *reinterpret_cast<Pack<f32, 8>*>(sums + ((sum_row * 136) + (sum_vector * 8))) = x_4;
        }
      }
    }
    f32 total0[8];
    {
#pragma unroll
      for (int v = 0; v < 8; ++v) {
        total0[v] = 0.0f;
      }
    }
    if (place_m < 40) {
#pragma unroll 4
      for (int sum_vector = own; sum_vector < 9; sum_vector += 8) {
        const int place_n = sum_vector;
        {
          const Pack<f32, 8> x_1 = *reinterpret_cast<const Pack<f32, 8>*>(sums + ((sum_row * 136) + (sum_vector * 8)));
#pragma unroll
          for (int v = 0; v < 8; ++v) {
            total0[v] = (total0[v] + x_1.at[v]);
          }
        }
      }
    }
#pragma unroll
    for (int v = 1; v < 8; ++v) total0[0] = Sum()(total0[0], total0[v]);
    const f32 r1[1] = {combined<8, Sum>(total0[0])};
    f32 total1[8];
    {
#pragma unroll
      for (int v = 0; v < 8; ++v) {
        total1[v] = 0.0f;
      }
    }
    if (place_m < 40) {
#pragma unroll 4
      for (int sum_vector = own; sum_vector < 9; sum_vector += 8) {
        const int place_n = sum_vector;
        {
          const Pack<f32, 8> x_1 = *reinterpret_cast<const Pack<f32, 8>*>(sums + ((sum_row * 136) + (sum_vector * 8)));
#pragma unroll
          for (int v = 0; v < 8; ++v) {
            const f32 x_3 = (x_1.at[v] - (r1[0] / 72.0f));
            total1[v] = (total1[v] + (x_3 * x_3));
          }
        }
      }
    }
#pragma unroll
    for (int v = 1; v < 8; ++v) total1[0] = Sum()(total1[0], total1[v]);
    const f32 r0[1] = {combined<8, Sum>(total1[0])};
    if (place_m < 40) {
      for (int sum_vector = own; sum_vector < 9; sum_vector += 8) {
        const int place_n = sum_vector;
        {
          const Pack<f32, 8> x_1 = *reinterpret_cast<const Pack<f32, 8>*>(sums + ((sum_row * 136) + (sum_vector * 8)));
          const Pack<f16, 8> x_2 = *reinterpret_cast<const Pack<f16, 8>*>(x4 + (place_n * 8));
          const Pack<f16, 8> x_3 = *reinterpret_cast<const Pack<f16, 8>*>(x5 + (place_n * 8));
          Pack<f16, 8> x_4;
#pragma unroll
          for (int v = 0; v < 8; ++v) {
            x_4.at[v] = narrow<f16>(((((x_1.at[v] - (r1[0] / 72.0f)) * rsqrtf(((r0[0] / 72.0f) + 9.99999975e-06f))) * wide(x_2.at[v])) + wide(x_3.at[v])));
          }
          *reinterpret_cast<Pack<f16, 8>*>(out + ((place_m * 72) + (place_n * 8))) = x_4;
        }
      }
    }
  }
}
