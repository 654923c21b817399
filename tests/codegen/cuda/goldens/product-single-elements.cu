// tensor cores: 33 x 35 x 69 by 32 x 64 x 32, 2 x 2 warps, 2 stages
// 2 blocks of 128 threads, 12288 bytes of shared memory
// prelude.cuh
// tensor_cores.cuh
// matmul.cuh
extern "C" __global__ void __launch_bounds__(128, 1) KERNEL_NAME(const f16* __restrict__ x0, const f16* __restrict__ x1, const f16* __restrict__ x2, const f16* __restrict__ x3, f16* __restrict__ out) {
  extern __shared__ __align__(128) unsigned char shared[];
  await_turn();
  const int tile = blockIdx.x / 1 % 2;
  const int group = tile / 8 * 8;
  const int height = min(2 - group, 8);
  const int m0 = (group + tile % 8 % height) * 32;
  const int n0 = tile % 8 / height * 64;
  Matrix<f16, 32, 32, false, true, 1, 128, 69, false> a(x0 + 0, m0, 0, 33, 69);
  Matrix<f16, 64, 32, true, false, 1, 128, 35, false> b(x1 + 0, n0, 0, 35, 69);
  using P = Product<f16, 32, 64, 32, 2, 2, 2, Matrix<f16, 32, 32, false, true, 1, 128, 69, false>, Matrix<f16, 64, 32, true, false, 1, 128, 35, false>>;
  f32* const sums = reinterpret_cast<P::Total*>(shared);
  P::begin(shared, a, b);
  P::finish(shared, sums, a, b, 3, [] {});
  __syncthreads();
#pragma unroll 4
  for (int turn = 0; turn < 16; ++turn) {
    const int i = turn * 128 + threadIdx.x;
    const int sum_row = i / 64;
    const int sum_vector = i % 64;
    const int place_m = m0 + sum_row, place_n = n0 / 1 + sum_vector;
    if (place_m < 33 && place_n < 35) {
      out[((place_m * 35) + place_n)] = narrow<f16>((maximum((sums[((sum_row * 72) + sum_vector)] + wide(x2[place_n])), 0.0f) + wide(x3[((place_m * 35) + place_n)])));
    }
  }
}
