// tensor cores: 40 x 48 x 200 by 32 x 32 x 32, 1 x 2 warps, 2 stages, k in 4 parts
// 16 blocks of 64 threads, 8192 bytes of shared memory
// prelude.cuh
// tensor_cores.cuh
// cluster.cuh
// matmul.cuh
extern "C" __global__ void __cluster_dims__(4, 1, 1) __launch_bounds__(64) KERNEL_NAME(const f16* __restrict__ x0, const f16* __restrict__ x1, const f16* __restrict__ x2, const f16* __restrict__ x3, f16* __restrict__ out) {
  extern __shared__ __align__(128) unsigned char shared[];
  await_turn();
  const int tile = blockIdx.x / 4 % 4;
  const int group = tile / 16 * 8;
  const int height = min(2 - group, 8);
  const int m0 = (group + tile % 16 % height) * 32;
  const int n0 = tile % 16 / height * 32;
  const int part = blockIdx.x % 4;
  const int first = 7 * part / 4, steps = 7 * (part + 1) / 4 - first;
  Matrix<f16, 32, 32, false, true, 8, 64, 200, false> a(x0 + 0, m0, first * 32, 40, min(200, (first + steps) * 32));
  Matrix<f16, 32, 32, false, false, 8, 64, 200, false> b(x1 + 0, n0, first * 32, 48, min(200, (first + steps) * 32));
  using P = Product<f16, 32, 32, 32, 1, 2, 2, Matrix<f16, 32, 32, false, true, 8, 64, 200, false>, Matrix<f16, 32, 32, false, false, 8, 64, 200, false>>;
  f32* const sums = reinterpret_cast<P::Total*>(shared);
  P::begin(shared, a, b);
  P::finish(shared, sums, a, b, steps, [] {});
  add_parts<4, 32, 32, 40, 64>(sums, part);
  __syncthreads();
#pragma unroll 1
  for (int turn = 0; turn < 1; ++turn) {
    const int i = turn * 64 + threadIdx.x;
    const int sum_row = part * 8 + i / 4;
    const int sum_vector = i % 4;
    const int place_m = m0 + sum_row, place_n = n0 / 8 + sum_vector;
    if (i < 32 && place_m < 40 && place_n < 6) {
      {
        const Pack<f32, 8> x_1 = *reinterpret_cast<const Pack<f32, 8>*>(sums + ((sum_row * 40) + (sum_vector * 8)));
        const Pack<f16, 8> x_2 = *reinterpret_cast<const Pack<f16, 8>*>(x2 + (place_n * 8));
        const Pack<f16, 8> x_3 = *reinterpret_cast<const Pack<f16, 8>*>(x3 + ((place_m * 48) + (place_n * 8)));
        Pack<f16, 8> x_4;
#pragma unroll
        for (int v = 0; v < 8; ++v) {
          x_4.at[v] = narrow<f16>((maximum((x_1.at[v] + wide(x_2.at[v])), 0.0f) + wide(x_3.at[v])));
        }
        *reinterpret_cast<Pack<f16, 8>*>(out + ((place_m * 48) + (place_n * 8))) = x_4;
      }
    }
  }
}
