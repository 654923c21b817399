// Runs programs one after another. In: for each, the number of instructions, the bytes of DRAM, the words, the DRAM.
// Out: for each, the cycles (0: no end within the limit), the DRAM. With a third argument, a waveform of the first.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>
#include "Vgemmini.h"
#include "Vgemmini___024root.h"
#include "verilated.h"
#ifdef WAVES
#include "verilated_vcd_c.h"
#endif

int main(int argc, char **argv) {
  FILE *in = std::fopen(argv[1], "rb"), *out = std::fopen(argv[2], "wb");
  if (!in || !out) return 2;
  VerilatedContext context;
  Vgemmini top(&context);
#ifdef WAVES
  VerilatedVcdC waves;
  context.traceEverOn(true);
  top.trace(&waves, 99);
  if (argc > 3) waves.open(argv[3]);
#endif
  uint64_t time = 0;
  auto tick = [&] {
    top.clk = 0; top.eval();
#ifdef WAVES
    if (argc > 3) waves.dump(time);
#endif
    time += 5;
    top.clk = 1; top.eval();
#ifdef WAVES
    if (argc > 3) waves.dump(time);
#endif
    time += 5;
  };
  auto &mem = top.rootp->gemmini__DOT__memory__DOT__mem;
  uint64_t head[3];
  while (std::fread(head, 8, 3, in) == 3) {
    std::vector<uint64_t> words(head[0] * 3);
    std::vector<uint8_t> dram(head[1]);
    if (std::fread(words.data(), 8, words.size(), in) != words.size()) return 3;
    if (std::fread(dram.data(), 1, dram.size(), in) != dram.size()) return 3;
    for (size_t at = 0; at < dram.size(); at++) mem[at] = dram[at];
    top.in_valid = 0;
    top.reset = 1; tick(); tick();
    top.reset = 0;
    uint64_t cycles = 0, at = 0;
    for (;; cycles++) {
      top.in_valid = at < head[0];
      if (at < head[0]) { top.word0 = words[3 * at]; top.word1 = words[3 * at + 1]; top.word2 = words[3 * at + 2]; }
      top.clk = 0; top.eval();
      if (at == head[0] && top.idle) break;
      bool taken = top.in_valid && top.in_ready;
      tick();
      if (taken) at++;
      if (cycles > head[2]) { cycles = 0; break; }
    }
    std::fwrite(&cycles, 8, 1, out);
    for (size_t i = 0; i < dram.size(); i++) dram[i] = mem[i];
    std::fwrite(dram.data(), 1, dram.size(), out);
  }
#ifdef WAVES
  waves.close();
#endif
  return std::fclose(out);
}
