// The accelerator: instructions in, DRAM behind it. One instruction is decoded a cycle; configuration is kept in the
// decoder and travels with each operation.
module gemmini import gemmini_types::*, gemmini_fields::*; #(
    parameter int DIM = 16, SP_ROWS = 1024, ACC_ROWS = 256, SP_BANKS = 4, BUS = 8, LATENCY = 32,
    parameter int LOADS = 8, EXECUTES = 16, STORES = 4, BYTES = 1 << 16
) (
    input  logic clk, reset,
    input  logic in_valid,
    input  logic [63:0] word0, word1, word2,
    output logic in_ready,
    output logic idle
);
  instruction_t in, between, now;
  logic between_valid, between_ready, now_valid, now_ready;
  assign in = {word0, word1, word2};
  loop_ws #(.DIM(DIM), .SP_ROWS(SP_ROWS)) loops (
      .clk, .reset, .in_valid, .in, .in_ready, .out_valid(between_valid), .out(between), .out_ready(between_ready));
  loop_conv_ws #(.DIM(DIM), .SP_ROWS(SP_ROWS)) convolutions (
      .clk, .reset, .in_valid(between_valid), .in(between), .in_ready(between_ready),
      .out_valid(now_valid), .out(now), .out_ready(now_ready));

  // -- decoding
  logic [15:0] a_stride;
  logic [31:0] load_stride [4], load_scale [4], store_stride, store_scale, target;
  logic [15:0] load_block [4];
  logic load_shrunk [4];
  pooling_t pooling;
  logic loaded;  // weights that no compute has taken yet
  op_t op;
  range_t sp_range, acc_range;
  logic is_op, waits_for_all, st_ready, st_empty;
  logic [1:0] slot;
  opcode_t code;
  logic [31:0] last;
  assign code = opcode_of(now);

  function automatic range_t range_of(input logic [31:0] address, input logic [31:0] count, input logic wanted_acc);
    range_t found;
    found.valid = address[31] == wanted_acc;
    found.first = {3'b0, address[28:0]};
    found.last = {3'b0, address[28:0]} + count;
    return found;
  endfunction

  always_comb begin
    op = '0;
    sp_range = '0;
    acc_range = '0;
    is_op = 0;
    slot = code == OP_MVIN2 ? 1 : code == OP_MVIN3 ? 2 : 0;
    waits_for_all = code == OP_FENCE || code == OP_FLUSH;
    last = 0;
    case (code)
      OP_MVIN, OP_MVIN2, OP_MVIN3: begin
        is_op = 1;
        op.unit = LOAD;
        op.dram = mvin_dram(now);
        op.local_row = mvin_local(now);
        op.rows = mvin_rows(now);
        op.cols = mvin_cols(now);
        op.stride = load_stride[slot];
        op.block_stride = load_block[slot];
        op.scale = load_scale[slot];
        op.shrunk = load_shrunk[slot];
        last = (32'(op.cols) + DIM - 1) / DIM * 32'(op.block_stride) - 32'(op.block_stride) + 32'(op.rows);
        sp_range = range_of(op.local_row, last, 0);
        acc_range = range_of(op.local_row, last, 1);
      end
      OP_MVOUT: begin
        is_op = 1;
        op.unit = STORE;
        op.dram = mvout_dram(now);
        op.local_row = mvout_local(now);
        op.rows = mvout_rows(now);
        op.cols = mvout_cols(now);
        op.stride = store_stride;
        op.scale = store_scale;
        op.pooling = pooling;
        last = pooling.pool_size == 0 ? 32'(op.rows) : 32'(pooling.rows_in) * 32'(pooling.cols_in);
        sp_range = range_of(op.local_row, last, 0);
        acc_range = range_of(op.local_row, last, 1);
      end
      OP_PRELOAD: begin
        is_op = preload_b(now) != '1;
        op.unit = EXECUTE;
        op.preload = 1;
        op.local_row = preload_b(now);
        op.rows = preload_rows(now);
        op.cols = preload_cols(now);
        sp_range = range_of(op.local_row, 32'(op.rows), 0);
      end
      OP_COMPUTE_PRELOADED, OP_COMPUTE_ACCUMULATED: begin
        is_op = 1;
        op.unit = EXECUTE;
        op.flip = code == OP_COMPUTE_PRELOADED && loaded;
        op.local_row = compute_preloaded_a(now);
        op.rows = compute_preloaded_rows(now);
        op.cols = compute_preloaded_cols(now);
        op.stride = 32'(a_stride);
        op.target = target;
        sp_range = range_of(op.local_row, (32'(op.rows) - 1) * 32'(a_stride) + 1, 0);
        acc_range = range_of(target, 32'(op.rows), 1);
      end
      default: ;
    endcase
  end
  assign now_ready = is_op ? st_ready : !waits_for_all || st_empty;

  always_ff @(posedge clk) begin
    if (now_valid && now_ready)
      case (code)
        OP_CONFIG_EX: a_stride <= config_ex_a_stride(now);
        OP_CONFIG_LD: begin
          load_stride[config_ld_slot(now)] <= config_ld_stride(now);
          load_scale[config_ld_slot(now)] <= config_ld_scale(now);
          load_block[config_ld_slot(now)] <= config_ld_block_stride(now);
          load_shrunk[config_ld_slot(now)] <= config_ld_shrunk(now);
        end
        OP_CONFIG_ST: begin
          store_stride <= config_st_stride(now);
          store_scale <= config_st_scale(now);
          pooling <= '{
              relu: config_st_relu(now), pool_size: config_st_pool_size(now), pool_stride: config_st_pool_stride(now),
              pool_top: config_st_pool_top(now), pool_left: config_st_pool_left(now),
              pool_pitch: config_st_pool_pitch(now), rows_in: config_st_rows_in(now), cols_in: config_st_cols_in(now),
              rows_out: config_st_rows_out(now), cols_out: config_st_cols_out(now)};
        end
        OP_PRELOAD: begin
          target <= preload_c(now);
          if (preload_b(now) != '1) loaded <= 1;
        end
        OP_COMPUTE_PRELOADED: loaded <= 0;
        OP_FLUSH: begin
          a_stride <= 1;
          loaded <= 0;
        end
        default: ;
      endcase
    if (reset) begin
      a_stride <= 1;
      loaded <= 0;
      pooling <= '0;
    end
  end

  // -- units
  logic issue_valid [3], issue_ready [3];
  op_t issue [3];
  logic load_done, preload_done, compute_done, store_done;
  station #(.LOADS(LOADS), .EXECUTES(EXECUTES), .STORES(STORES)) waiting (
      .clk, .reset, .valid(now_valid && is_op), .op, .scratchpad(sp_range), .accumulator(acc_range),
      .ready(st_ready), .empty(st_empty), .issue_valid, .issue, .issue_ready,
      .load_done, .preload_done, .compute_done, .store_done);

  logic read_valid, read_ready, response_valid, write_valid, write_last, write_ready;
  logic [47:0] read_address, write_address;
  beat_t read_beat, beat;
  logic [7:0] response [BUS], write_data [BUS];
  logic [15:0] write_count;
  load_unit #(.DIM(DIM), .BUS(BUS)) loader (
      .clk, .reset, .valid(issue_valid[LOAD]), .op(issue[LOAD]), .ready(issue_ready[LOAD]),
      .read_valid, .read_address, .read_beat, .read_ready);
  dram #(.BUS(BUS), .LATENCY(LATENCY), .BYTES(BYTES)) memory (
      .clk, .reset, .read_valid, .read_address, .read_beat, .read_ready,
      .response_valid, .response_beat(beat), .response,
      .write_valid, .write_last, .write_address, .write_count, .write_data, .write_ready, .write_done(store_done));

  logic [31:0] a_row, b_row, result_row, row_read;
  logic signed [7:0] a_data [DIM], b_data [DIM];
  logic signed [31:0] result [DIM], row_data [DIM];
  logic result_valid;
  execute_unit #(.DIM(DIM), .SP_ROWS(SP_ROWS), .SP_BANKS(SP_BANKS)) executer (
      .clk, .reset, .valid(issue_valid[EXECUTE]), .op(issue[EXECUTE]), .ready(issue_ready[EXECUTE]),
      .a_row, .b_row, .a_data, .b_data, .result_valid, .result_row, .result, .preload_done, .compute_done);
  store_unit #(.DIM(DIM), .BUS(BUS)) storer (
      .clk, .reset, .valid(issue_valid[STORE]), .op(issue[STORE]), .ready(issue_ready[STORE]),
      .row_read, .row_data, .write_valid, .write_last, .write_address, .write_count, .write_data, .write_ready);

  // -- local memories: a port for each unit
  logic signed [7:0] scratchpad [SP_ROWS][DIM];
  logic signed [31:0] accumulator [ACC_ROWS][DIM];
  localparam int SP_BITS = $clog2(SP_ROWS), ACC_BITS = $clog2(ACC_ROWS);
  logic [SP_BITS-1:0] sp_to;
  logic [ACC_BITS-1:0] acc_to, result_to;
  assign sp_to = SP_BITS'(beat.row[28:0]);
  assign acc_to = ACC_BITS'(beat.row[28:0]);
  assign result_to = ACC_BITS'(result_row[28:0]);
  assign load_done = response_valid && beat.done;

  always_comb
    for (int lane = 0; lane < DIM; lane++) begin
      a_data[lane] = a_row < SP_ROWS ? scratchpad[SP_BITS'(a_row)][lane] : 0;
      b_data[lane] = b_row < SP_ROWS ? scratchpad[SP_BITS'(b_row)][lane] : 0;
      row_data[lane] = 0;
      if (row_read[31]) begin
        if (32'(row_read[28:0]) < ACC_ROWS) row_data[lane] = accumulator[ACC_BITS'(row_read)][lane];
      end else if (row_read < SP_ROWS) row_data[lane] = 32'(scratchpad[SP_BITS'(row_read)][lane]);
    end

  function automatic logic signed [31:0] loaded_element(input int at, input logic in_accumulator);
    logic signed [7:0] narrow;
    narrow = response[at % BUS];
    if (!beat.shrunk)
      return {response[(at * 4 + 3) % BUS], response[(at * 4 + 2) % BUS], response[(at * 4 + 1) % BUS],
              response[(at * 4) % BUS]};
    return in_accumulator ? scaled(32'(narrow), beat.scale, -64'd2147483648, 64'd2147483647)
                          : scaled(32'(narrow), beat.scale, -64'd128, 64'd127);
  endfunction

  logic signed [31:0] incoming [DIM];
  logic touched [DIM];
  always_comb
    for (int lane = 0; lane < DIM; lane++) begin
      incoming[lane] = 0;
      touched[lane] = beat.first;
      if (16'(lane) >= beat.col && 16'(lane) < beat.col + beat.count) begin
        incoming[lane] = loaded_element(lane - int'(beat.col), beat.row[31]);
        touched[lane] = 1;
      end
    end

  always_ff @(posedge clk) begin
    if (result_valid)
      for (int lane = 0; lane < DIM; lane++)
        accumulator[result_to][lane] <=
            result[lane] + (result_row[30] ? accumulator[result_to][lane] : 0);
    if (response_valid)
      for (int lane = 0; lane < DIM; lane++)
        if (touched[lane]) begin
          if (!beat.row[31]) scratchpad[sp_to][lane] <= incoming[lane][7:0];
          else accumulator[acc_to][lane] <= incoming[lane] + (beat.row[30] ? accumulator[acc_to][lane] : 0);
        end
  end

  assign idle = st_empty && !now_valid && !in_valid;
endmodule
