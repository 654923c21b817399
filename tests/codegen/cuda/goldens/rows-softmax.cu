// rows: max of 1000, sum of 1000, 64 of 128 threads each
// 256 blocks of 128 threads, 0 bytes of shared memory
// prelude.cuh
extern "C" __global__ void __launch_bounds__(128) KERNEL_NAME(const f16* __restrict__ x0, f16* __restrict__ out) {
  await_turn();
  f32 acc_r1[1];
  f16 kept1[16];
  f32 acc_r0[1];
  f32 kept2[16];
  const int b = blockIdx.x;
  {
    const int t = threadIdx.x;
    acc_r1[0] = __int_as_float(0xff800000);
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      if ((((s * 64) + (t % 64)) < 125)) {
        {
          const Pack<f16, 8> x_1 = *reinterpret_cast<const Pack<f16, 8>*>(x0 + ((((b * 2000) + ((t / 64) * 1000)) + (s * 512)) + ((t % 64) * 8)));
#pragma unroll
          for (int v = 0; v < 8; ++v) {
            kept1[((s * 8) + v)] = x_1.at[v];
          }
        }
      }
    }
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      if ((((s * 64) + (t % 64)) < 125)) {
#pragma unroll
        for (int v = 0; v < 8; ++v) {
          acc_r1[0] = maximum(acc_r1[0], wide(kept1[((s * 8) + v)]));
        }
      }
    }
  }
  acc_r1[0] = combined<64, Max>(acc_r1[0]);
  {
    const int t = threadIdx.x;
    acc_r0[0] = 0.0f;
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      if ((((s * 64) + (t % 64)) < 125)) {
#pragma unroll
        for (int v = 0; v < 8; ++v) {
          kept2[((s * 8) + v)] = power_of_two(((wide(kept1[((s * 8) + v)]) - acc_r1[0]) * 1.44269502f));
          acc_r0[0] = (acc_r0[0] + kept2[((s * 8) + v)]);
        }
      }
    }
  }
  acc_r0[0] = combined<64, Sum>(acc_r0[0]);
  {
    const int t = threadIdx.x;
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      if ((((s * 64) + (t % 64)) < 125)) {
        {
          Pack<f16, 8> x_3;
#pragma unroll
          for (int v = 0; v < 8; ++v) {
            x_3.at[v] = narrow<f16>((kept2[((s * 8) + v)] * (1.0f / acc_r0[0])));
          }
          *reinterpret_cast<Pack<f16, 8>*>(out + ((((b * 2000) + ((t / 64) * 1000)) + (s * 512)) + ((t % 64) * 8))) = x_3;
        }
      }
    }
  }
}
