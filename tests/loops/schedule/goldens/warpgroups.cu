extern "C" __global__ void __launch_bounds__(384, 1) KERNEL_NAME(const f16* __restrict__ a, const f16* __restrict__ b, const f16* __restrict__ bias, f16* __restrict__ out, const __grid_constant__ TensorMap map0, const __grid_constant__ TensorMap map1) {
  await_turn();
  extern __shared__ __align__(1024) unsigned char shared[];
  f16* const a_tile = reinterpret_cast<f16*>(shared + 0);
  const unsigned a_tile_at = shared_address(a_tile);
  f16* const b_tile = reinterpret_cast<f16*>(shared + 65536);
  const unsigned b_tile_at = shared_address(b_tile);
  f32 product[128];
  const int thread = threadIdx.x;
  const int warpgroup = __shfl_sync(0xffffffffu, (int)threadIdx.x / 128, 0);
  const unsigned ring_0 = shared_address(shared) + 196608;
  if (threadIdx.x == 0) {
    prefetch_map(map0);
    prefetch_map(map1);
    for (int slot = 0; slot < 4; ++slot) {
      begin_barrier(ring_0 + 8 * slot, 1);
      begin_barrier(ring_0 + 8 * (slot + 4), 8);
    }
    fence_barriers();
  }
  __syncthreads();
  const int block = blockIdx.x;
  if (threadIdx.x >= 256) {
    give_registers<40>();
    if (threadIdx.x == 256) {
#pragma unroll 1
      for (int product_r0_o = 0; product_r0_o < 64; ++product_r0_o) {
        await_phase(ring_0 + 8 * ((product_r0_o % 4)) + 32, (((product_r0_o / 4) + 1) % 2));
        expect_bytes(ring_0 + 8 * ((product_r0_o % 4)), 49152);
        copy_box(a_tile_at + (((product_r0_o % 4) * 8192)) * 2 + 0, map0, (int)((product_r0_o * 64)), (int)(((block / 16) * 128)), ring_0 + 8 * ((product_r0_o % 4)));
        copy_box(b_tile_at + (((product_r0_o % 4) * 16384)) * 2 + 0, map1, (int)((product_r0_o * 64)), (int)(((block % 16) * 256)), ring_0 + 8 * ((product_r0_o % 4)));
      }
    }
  }
  else {
    take_registers<232>();
    {
      const int thread = threadIdx.x;
#pragma unroll
      for (int product_n = 0; product_n < 128; ++product_n) {
        product[product_n] = 0.0f;
      }
    }
#pragma unroll 1
    for (int product_r0_o = 0; product_r0_o < 64; ++product_r0_o) {
      await_phase(ring_0 + 8 * ((product_r0_o % 4)), ((product_r0_o / 4) % 2));
      begin_multiplications();
#pragma unroll
      for (int product_r0_i_o = 0; product_r0_i_o < 4; ++product_r0_i_o) {
        multiply_0(product + 0, matrix_descriptor(a_tile_at + (((((product_r0_o % 4) * 8192) + (warpgroup * 4096)) + (product_r0_i_o * 16))) * 2 + 0, 4611686293305360384ull), matrix_descriptor(b_tile_at + ((((product_r0_o % 4) * 16384) + (product_r0_i_o * 16))) * 2 + 0, 4611686293305360384ull), 1);
      }
      commit_multiplications();
      await_multiplications_but_one();
      if ((0 < product_r0_o)) {
        __syncwarp();
        if ((threadIdx.x & 31) == 0) arrive(ring_0 + 8 * (((product_r0_o + 3) % 4)) + 32);
      }
    }
    commit_multiplications();
    await_multiplications_128(product);
    __syncwarp();
    if ((threadIdx.x & 31) == 0) arrive(ring_0 + 8 * (3) + 32);
    {
      const int thread = threadIdx.x;
#pragma unroll
      for (int out_i0_i_i_n = 0; out_i0_i_i_n < 64; ++out_i0_i_i_n) {
        {
          const Pack<f16, 2> x_1 = *reinterpret_cast<const Pack<f16, 2>*>(bias + ((((block % 16) * 256) + ((out_i0_i_i_n / 2) * 8)) + ((((thread % 128) % 32) % 4) * 2)));
          Pack<f16, 2> x_2;
#pragma unroll
          for (int out_i0_i_i_v = 0; out_i0_i_i_v < 2; ++out_i0_i_i_v) {
            x_2.at[out_i0_i_i_v] = narrow<f16>(maximum((product[((out_i0_i_i_n * 2) + out_i0_i_i_v)] + wide(x_1.at[out_i0_i_i_v])), 0.0f));
          }
          const int x_3 = ((thread % 128) % 32);
          const int x_4 = (thread % 128);
          *reinterpret_cast<Pack<f16, 2>*>(out + (((((((((block / 16) * 524288) + (warpgroup * 262144)) + ((x_4 / 32) * 65536)) + ((out_i0_i_i_n % 2) * 32768)) + ((x_3 / 4) * 4096)) + ((block % 16) * 256)) + ((out_i0_i_i_n / 2) * 8)) + ((x_3 % 4) * 2))) = x_2;
        }
      }
    }
  }
}
