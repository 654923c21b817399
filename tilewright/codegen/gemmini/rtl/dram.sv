// The memory behind the DMA: one beat of BUS bytes a cycle, reads and writes in turn where both want it, each done
// LATENCY cycles later, in order.
module dram import gemmini_types::*; #(
    parameter int BUS = 8, LATENCY = 32, BYTES = 1 << 16
) (
    input  logic clk, reset,
    input  logic read_valid,
    input  logic [47:0] read_address,
    input  beat_t read_beat,
    output logic read_ready,
    output logic response_valid,
    output beat_t response_beat,
    output logic [7:0] response [BUS],
    input  logic write_valid, write_last,
    input  logic [47:0] write_address,
    input  logic [15:0] write_count,
    input  logic [7:0] write_data [BUS],
    output logic write_ready, write_done
);
  typedef struct packed {
    logic read, write, last;
    logic [47:0] address;
    logic [15:0] count;
    beat_t beat;
    logic [BUS-1:0][7:0] data;
  } entry_t;

  logic [7:0] mem [BYTES] /* verilator public_flat_rw */;
  entry_t pipe [LATENCY];
  entry_t entering, leaving;
  logic [$clog2(LATENCY)-1:0] at;
  logic turn;  // whose it is where both want the bus

  assign read_ready = read_valid && (!write_valid || !turn);
  assign write_ready = write_valid && !read_ready;
  assign leaving = pipe[at];
  assign response_valid = leaving.read;
  assign response_beat = leaving.beat;
  assign write_done = leaving.write && leaving.last;

  always_comb begin
    entering = '0;
    if (read_ready) begin
      entering.read = 1;
      entering.address = read_address;
      entering.beat = read_beat;
    end else if (write_ready) begin
      entering.write = 1;
      entering.address = write_address;
      entering.count = write_count;
      entering.last = write_last;
      for (int b = 0; b < BUS; b++) entering.data[b] = write_data[b];
    end
    for (int b = 0; b < BUS; b++) begin
      response[b] = 0;
      if (leaving.read && !leaving.beat.zero && leaving.address + 48'(b) < 48'(BYTES))
        response[b] = mem[32'(leaving.address) + b];
    end
  end

  always_ff @(posedge clk) begin
    pipe[at] <= entering;
    at <= at == ($clog2(LATENCY))'(LATENCY - 1) ? 0 : at + 1;
    if (read_ready) turn <= 1;
    if (write_ready) turn <= 0;
    if (leaving.write)
      for (int b = 0; b < BUS; b++)
        if (16'(b) < leaving.count && leaving.address + 48'(b) < 48'(BYTES))
          mem[32'(leaving.address) + b] <= leaving.data[b];
    if (reset) begin
      at <= 0;
      turn <= 0;
      for (int slot = 0; slot < LATENCY; slot++) pipe[slot] <= '0;
    end
  end
endmodule
