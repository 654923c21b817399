// tensor cores: 40 x 48 x 72 by 32 x 32 x 32, 1 x 2 warps, 3 stages, the left computed on the way, statistics of rows first
// 4 blocks of 64 threads, 12544 bytes of shared memory
// prelude.cuh
// tensor_cores.cuh
// matmul.cuh
struct Left {
  const f16* x0;
  const f32* of_row0;
  const f32* of_row1;
  const f16* x1;
  const f16* x2;
  int m0;
  struct Chunk {
    f16 kept0[8];
    f32 kept1[1];
    f32 kept2[1];
    f16 kept3[8];
    f16 kept4[8];
  };
  __device__ bool read(Chunk& into, int outer, int at_k) const {
    if (!(true)) return false;
    f16 (&kept0)[8] = into.kept0;
    f32 (&kept1)[1] = into.kept1;
    f32 (&kept2)[1] = into.kept2;
    f16 (&kept3)[8] = into.kept3;
    f16 (&kept4)[8] = into.kept4;
    {
      const Pack<f16, 8> x_1 = *reinterpret_cast<const Pack<f16, 8>*>(x0 + ((outer * 72) + (at_k * 8)));
#pragma unroll
      for (int v = 0; v < 8; ++v) {
        kept0[v] = x_1.at[v];
      }
    }
    kept1[0] = of_row0[(outer + (m0 * -1))];
    kept2[0] = of_row1[(outer + (m0 * -1))];
    {
      const Pack<f16, 8> x_3 = *reinterpret_cast<const Pack<f16, 8>*>(x1 + (at_k * 8));
#pragma unroll
      for (int v = 0; v < 8; ++v) {
        kept3[v] = x_3.at[v];
      }
    }
    {
      const Pack<f16, 8> x_5 = *reinterpret_cast<const Pack<f16, 8>*>(x2 + (at_k * 8));
#pragma unroll
      for (int v = 0; v < 8; ++v) {
        kept4[v] = x_5.at[v];
      }
    }
    return true;
  }
  __device__ static void compute(const Chunk& from, f16 (&value)[8]) {
    const f16 (&kept0)[8] = from.kept0;
    const f32 (&kept1)[1] = from.kept1;
    const f32 (&kept2)[1] = from.kept2;
    const f16 (&kept3)[8] = from.kept3;
    const f16 (&kept4)[8] = from.kept4;
    {
#pragma unroll
      for (int v = 0; v < 8; ++v) {
        value[v] = narrow<f16>(((((wide(kept0[v]) - kept1[0]) * kept2[0]) * wide(kept3[v])) + wide(kept4[v])));
      }
    }
  }
};
extern "C" __global__ void __launch_bounds__(64) KERNEL_NAME(const f16* __restrict__ x0, const f16* __restrict__ x1, const f16* __restrict__ x2, const f16* __restrict__ x3, const f16* __restrict__ x4, f16* __restrict__ out) {
  extern __shared__ __align__(128) unsigned char shared[];
  await_turn();
  const int tile = blockIdx.x / 1 % 4;
  const int group = tile / 16 * 8;
  const int height = min(2 - group, 8);
  const int m0 = (group + tile % 16 % height) * 32;
  const int n0 = tile % 16 / height * 32;
  f32* const of_row0 = reinterpret_cast<f32*>(shared + 12288);
  f32* const of_row1 = reinterpret_cast<f32*>(shared + 12416);
  for (int first_row = 0; first_row < 32; first_row += 16) {
    const int own = threadIdx.x % 4, sum_row = first_row + threadIdx.x / 4;
    const int place_m = min(m0 + sum_row, 39);
    f32 total0[8];
    {
#pragma unroll
      for (int v = 0; v < 8; ++v) {
        total0[v] = 0.0f;
      }
    }
    {
#pragma unroll 4
      for (int at_k = own; at_k < 9; at_k += 4) {
        {
          const Pack<f16, 8> x_1 = *reinterpret_cast<const Pack<f16, 8>*>(x0 + ((place_m * 72) + (at_k * 8)));
#pragma unroll
          for (int v = 0; v < 8; ++v) {
            total0[v] = (total0[v] + wide(x_1.at[v]));
          }
        }
      }
    }
#pragma unroll
    for (int v = 1; v < 8; ++v) total0[0] = Sum()(total0[0], total0[v]);
    const f32 r1[1] = {combined<4, Sum>(total0[0])};
    f32 total1[8];
    {
#pragma unroll
      for (int v = 0; v < 8; ++v) {
        total1[v] = 0.0f;
      }
    }
    {
#pragma unroll 4
      for (int at_k = own; at_k < 9; at_k += 4) {
        {
          const Pack<f16, 8> x_1 = *reinterpret_cast<const Pack<f16, 8>*>(x0 + ((place_m * 72) + (at_k * 8)));
#pragma unroll
          for (int v = 0; v < 8; ++v) {
            const f32 x_3 = (wide(x_1.at[v]) - (r1[0] / 72.0f));
            total1[v] = (total1[v] + (x_3 * x_3));
          }
        }
      }
    }
#pragma unroll
    for (int v = 1; v < 8; ++v) total1[0] = Sum()(total1[0], total1[v]);
    const f32 r0[1] = {combined<4, Sum>(total1[0])};
    if (own == 0) {
      of_row0[sum_row] = (r1[0] / 72.0f);
      of_row1[sum_row] = rsqrtf(((r0[0] / 72.0f) + 9.99999975e-06f));
    }
  }
  __syncthreads();
  Computed<f16, 32, 32, false, true, 8, 64, Left> a(Left{x0, of_row0, of_row1, x1, x2, m0}, m0, 0, 40, 72);
  Matrix<f16, 32, 32, false, false, 8, 64, 72, false> b(x3 + 0, n0, 0, 48, 72);
  using P = Product<f16, 32, 32, 32, 1, 2, 3, Computed<f16, 32, 32, false, true, 8, 64, Left>, Matrix<f16, 32, 32, false, false, 8, 64, 72, false>>;
  f32* const sums = reinterpret_cast<P::Total*>(shared);
  P::begin(shared, a, b);
  P::finish(shared, sums, a, b, 3, [] {});
  __syncthreads();
#pragma unroll 2
  for (int turn = 0; turn < 2; ++turn) {
    const int i = turn * 64 + threadIdx.x;
    const int sum_row = i / 4;
    const int sum_vector = i % 4;
    const int place_m = m0 + sum_row, place_n = n0 / 8 + sum_vector;
    if (place_m < 40 && place_n < 6) {
      {
        const Pack<f32, 8> x_1 = *reinterpret_cast<const Pack<f32, 8>*>(sums + ((sum_row * 40) + (sum_vector * 8)));
        const Pack<f16, 8> x_2 = *reinterpret_cast<const Pack<f16, 8>*>(x4 + (place_n * 8));
        Pack<f16, 8> x_3;
#pragma unroll
        for (int v = 0; v < 8; ++v) {
          x_3.at[v] = narrow<f16>((x_1.at[v] + wide(x_2.at[v])));
        }
        *reinterpret_cast<Pack<f16, 8>*>(out + ((place_m * 48) + (place_n * 8))) = x_3;
      }
    }
  }
}
