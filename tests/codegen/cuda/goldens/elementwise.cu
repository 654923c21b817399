// elementwise: 256 threads of 1 x 8
// 2048 blocks of 256 threads, 0 bytes of shared memory
// prelude.cuh
extern "C" __global__ void __launch_bounds__(256) KERNEL_NAME(const f16* __restrict__ x0, const f16* __restrict__ x1, f16* __restrict__ out) {
  await_turn();
  const int b = blockIdx.x;
  {
    const int t = threadIdx.x;
    {
      const Pack<f16, 8> x_1 = *reinterpret_cast<const Pack<f16, 8>*>(x0 + (((b * 2048) + ((t / 128) * 1024)) + ((t % 128) * 8)));
      const Pack<f16, 8> x_2 = *reinterpret_cast<const Pack<f16, 8>*>(x1 + ((t % 128) * 8));
      Pack<f16, 8> x_3;
#pragma unroll
      for (int v = 0; v < 8; ++v) {
        x_3.at[v] = narrow<f16>(maximum((wide(x_1.at[v]) + wide(x_2.at[v])), 0.0f));
      }
      *reinterpret_cast<Pack<f16, 8>*>(out + ((b * 2048) + (t * 8))) = x_3;
    }
  }
}
