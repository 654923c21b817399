// The three units. Each takes operations in order; the reservation station has seen to it that they may run.

// mvin: one beat of DRAM a cycle; several operations may be under way.
module load_unit import gemmini_types::*; #(parameter int DIM = 16, BUS = 8) (
    input  logic clk, reset,
    input  logic valid,
    input  op_t op,
    output logic ready,        // it takes the operation
    output logic read_valid,
    output logic [47:0] read_address,
    output beat_t read_beat,
    input  logic read_ready
);
  op_t now;
  logic busy;
  logic [15:0] row, block, offset;  // offset: bytes in the block
  logic wide, last_beat, last_block, last_row;
  logic [15:0] width, bytes;

  assign wide = now.local_row[31] && !now.shrunk;
  assign width = now.cols - block * 16'(DIM) > 16'(DIM) ? 16'(DIM) : now.cols - block * 16'(DIM);
  assign bytes = wide ? width << 2 : width;
  assign last_beat = now.dram == 0 || offset + 16'(BUS) >= bytes;
  assign last_block = (block + 1) * 16'(DIM) >= now.cols;
  assign last_row = row + 1 == now.rows;
  assign read_valid = busy;
  assign read_address = now.dram + 48'(row) * 48'(now.stride) + 48'(block) * 48'(wide ? 4 * DIM : 1 * DIM) + 48'(offset);
  assign ready = valid && (!busy || (read_ready && last_beat && last_block && last_row));

  always_comb begin
    read_beat = '0;
    read_beat.row = now.local_row + 32'(block) * 32'(now.block_stride) + 32'(row);
    read_beat.col = wide ? offset >> 2 : offset;
    read_beat.count = now.dram == 0 ? 0 : (bytes - offset > 16'(BUS) ? 16'(BUS) : bytes - offset) >> (wide ? 2 : 0);
    read_beat.first = offset == 0;
    read_beat.zero = now.dram == 0;
    read_beat.shrunk = !wide;
    read_beat.scale = now.scale;
    read_beat.done = last_beat && last_block && last_row;
  end

  always_ff @(posedge clk) begin
    if (read_ready) begin
      offset <= offset + 16'(BUS);
      if (last_beat) begin
        offset <= 0;
        block <= block + 1;
        if (last_block) begin
          block <= 0;
          row <= row + 1;
          if (last_row) busy <= 0;
        end
      end
    end
    if (ready) begin
      now <= op;
      busy <= 1;
      row <= 0;
      block <= 0;
      offset <= 0;
    end
    if (reset) busy <= 0;
  end
endmodule

// preload and compute: a compute and the preload behind it run together where they read different banks.
module execute_unit import gemmini_types::*; #(parameter int DIM = 16, SP_ROWS = 1024, SP_BANKS = 4) (
    input  logic clk, reset,
    input  logic valid,
    input  op_t op,
    output logic ready,
    // one row for each of A and B, read in the same cycle
    output logic [31:0] a_row, b_row,
    input  logic signed [7:0] a_data [DIM],
    input  logic signed [7:0] b_data [DIM],
    output logic result_valid,
    output logic [31:0] result_row,
    output logic signed [31:0] result [DIM],
    output logic preload_done, compute_done
);
  localparam int BANK = (SP_ROWS + SP_BANKS - 1) / SP_BANKS;
  localparam int DELAY = 2 * DIM + 1;
  typedef struct packed {
    logic valid, last;
    logic [31:0] row;
  } out_t;

  op_t waiting [2], compute, preload;
  logic [1:0] count;
  logic computing, preloading, sel;
  logic [15:0] step, length;
  out_t delay [DELAY];
  logic signed [7:0] a [DIM], d [DIM];

  logic free, start_compute, start_preload, together;
  logic [1:0] taken;
  logic [31:0] a_last, b_last;
  assign free = !(computing || preloading) || step + 1 == length;
  assign a_last = waiting[0].local_row + (32'(waiting[0].rows) - 1) * waiting[0].stride;
  assign b_last = waiting[1].local_row + (32'(waiting[1].rows) - 1);
  assign together = count == 2 && !waiting[0].preload && waiting[1].preload
      && (a_last / BANK < waiting[1].local_row / BANK || b_last / BANK < waiting[0].local_row / BANK);
  assign start_compute = free && count != 0 && !waiting[0].preload;
  assign start_preload = free && count != 0 && (waiting[0].preload || together);
  assign taken = 2'(start_compute) + 2'(start_preload);
  assign ready = valid && (count < 2 || taken != 0);

  assign a_row = compute.local_row + 32'(step) * compute.stride;
  assign b_row = preload.local_row + 32'(DIM - 1) - 32'(step);
  always_comb
    for (int lane = 0; lane < DIM; lane++) begin
      a[lane] = computing && step < compute.rows && 16'(lane) < compute.cols ? a_data[lane] : 0;
      d[lane] = preloading && 16'(DIM - 1) - step < preload.rows && 16'(lane) < preload.cols ? b_data[lane] : 0;
    end

  array #(.DIM(DIM)) mesh (.clk, .reset, .a, .d, .sel, .load(preloading), .sums(result));
  assign result_valid = delay[DELAY-1].valid;
  assign result_row = delay[DELAY-1].row;
  assign compute_done = delay[DELAY-1].valid && delay[DELAY-1].last;
  assign preload_done = preloading && step + 1 == length;

  always_ff @(posedge clk) begin
    delay[0].valid <= computing && step < compute.rows;
    delay[0].last <= step + 1 == compute.rows;
    delay[0].row <= compute.target + 32'(step);
    for (int at = 1; at < DELAY; at++) delay[at] <= delay[at-1];

    step <= step + 1;
    if (free) begin
      computing <= start_compute;
      preloading <= start_preload;
      step <= 0;
      length <= start_preload ? 16'(DIM) : waiting[0].rows;
      if (start_compute) begin
        compute <= waiting[0];
        if (waiting[0].flip) sel <= ~sel;
      end
      if (start_preload) preload <= start_compute ? waiting[1] : waiting[0];
    end
    if (taken == 1) waiting[0] <= waiting[1];
    if (ready) waiting[1'(count - taken)] <= op;
    count <= count - taken + 2'(ready);
    if (reset) begin
      count <= 0;
      computing <= 0;
      preloading <= 0;
      sel <= 0;
      for (int at = 0; at < DELAY; at++) delay[at].valid <= 0;
    end
  end
endmodule

// mvout: a row, or the maximum of a window of rows, scaled on its way to DRAM.
module store_unit import gemmini_types::*; #(parameter int DIM = 16, BUS = 8) (
    input  logic clk, reset,
    input  logic valid,
    input  op_t op,
    output logic ready,
    output logic [31:0] row_read,
    input  logic signed [31:0] row_data [DIM],  // of the memory that the address names
    output logic write_valid, write_last,
    output logic [47:0] write_address,
    output logic [15:0] write_count,
    output logic [7:0] write_data [BUS],
    input  logic write_ready
);
  op_t now;
  pooling_t pool;
  logic busy, gathered, wide, accumulator, covered, last_beat, last_row, last_tap;
  logic [15:0] row, offset, bytes, out_row, out_col;
  logic [7:0] tap_row, tap_col;
  logic signed [15:0] in_row, in_col;
  logic signed [31:0] value [DIM];
  logic signed [7:0] best [DIM];

  assign pool = now.pooling;
  assign accumulator = now.local_row[31];
  assign wide = accumulator && now.local_row[29];
  assign bytes = wide ? now.cols << 2 : now.cols;
  assign in_row = 16'(out_row * 16'(pool.pool_stride)) + 16'(tap_row) - 16'(pool.pool_top);
  assign in_col = 16'(out_col * 16'(pool.pool_stride)) + 16'(tap_col) - 16'(pool.pool_left);
  assign covered = in_row >= 0 && in_row < 16'(pool.rows_in) && in_col >= 0 && in_col < 16'(pool.cols_in);
  assign last_tap = tap_row + 1 == 8'(pool.pool_size) && tap_col + 1 == 8'(pool.pool_size);
  assign row_read = (now.local_row & 32'h9fffffff)
      + (pool.pool_size == 0 ? 32'(row) : 32'(in_row) * 32'(pool.cols_in) + 32'(in_col));
  assign last_beat = offset + 16'(BUS) >= bytes;
  assign last_row = pool.pool_size == 0 ? row + 1 == now.rows
      : out_row + 1 == 16'(pool.rows_out) && out_col + 1 == 16'(pool.cols_out);
  assign write_valid = busy && (pool.pool_size == 0 || gathered);
  assign write_last = last_beat && last_row;
  assign write_address = now.dram + 48'(offset) + 48'(now.stride)
      * (pool.pool_size == 0 ? 48'(row) : 48'(out_row) * 48'(pool.pool_pitch) + 48'(out_col));
  assign write_count = bytes - offset > 16'(BUS) ? 16'(BUS) : bytes - offset;
  assign ready = valid && (!busy || (write_ready && last_beat && last_row));

  always_comb begin
    for (int lane = 0; lane < DIM; lane++) begin
      value[lane] = pool.relu && row_data[lane] < 0 ? 0 : row_data[lane];
      if (accumulator && !wide) value[lane] = scaled(value[lane], now.scale, -64'd128, 64'd127);
      if (pool.pool_size != 0 && gathered) value[lane] = 32'(best[lane]);
    end
    for (int b = 0; b < BUS; b++) begin
      write_data[b] = 0;
      if (wide) begin
        if (32'(offset) + b < DIM * 4) write_data[b] = value[(32'(offset) + b) / 4][(b % 4) * 8 +: 8];
      end else if (32'(offset) + b < DIM) write_data[b] = value[32'(offset) + b][7:0];
    end
  end

  always_ff @(posedge clk) begin
    if (busy && pool.pool_size != 0 && !gathered) begin
      if (covered)
        for (int lane = 0; lane < DIM; lane++)
          if (value[lane] > 32'(best[lane])) best[lane] <= value[lane][7:0];
      tap_col <= tap_col + 1;
      if (tap_col + 1 == 8'(pool.pool_size)) begin
        tap_col <= 0;
        tap_row <= tap_row + 1;
      end
      if (last_tap) gathered <= 1;
    end
    if (write_ready) begin
      offset <= offset + 16'(BUS);
      if (last_beat) begin
        offset <= 0;
        row <= row + 1;
        out_col <= out_col + 1;
        if (out_col + 1 == 16'(pool.cols_out)) begin
          out_col <= 0;
          out_row <= out_row + 1;
        end
        gathered <= 0;
        tap_row <= 0;
        tap_col <= 0;
        for (int lane = 0; lane < DIM; lane++) best[lane] <= -128;
        if (last_row) busy <= 0;
      end
    end
    if (ready) begin
      now <= op;
      busy <= 1;
      row <= 0;
      offset <= 0;
      out_row <= 0;
      out_col <= 0;
      gathered <= 0;
      tap_row <= 0;
      tap_col <= 0;
      for (int lane = 0; lane < DIM; lane++) best[lane] <= -128;
    end
    if (reset) busy <= 0;
  end
endmodule
