// A whole matmul as primitive instructions, one a cycle:
//   for k, j, i: [D(i, j)] [B(k, j)] [A(i, k)] preload, compute [C(i, j)]
module loop_ws import gemmini_fields::*; #(parameter int DIM = 16, SP_ROWS = 1024) (
    input  logic clk, reset,
    input  logic in_valid,
    input  instruction_t in,
    output logic in_ready,
    output logic out_valid,
    output instruction_t out,
    input  logic out_ready
);
  localparam logic [31:0] NONE = '1;
  localparam logic [31:0] ACC = 32'h80000000, ADD = 32'h40000000, FULL = 32'h20000000;
  localparam logic [31:0] ONE = 32'h3f800000;
  instruction_t bounds, ab, dc, strides_ab, strides_dc, now;
  logic busy;
  logic [3:0] step;  // 0..4 configuration; 5 D, 6 B, 7 A, 8 preload, 9 compute, 10 C
  logic [15:0] i, j, k, blocks_i, blocks_j, blocks_k, rows, cols, depth;
  logic [31:0] a_local, b_local, c_local;
  logic [47:0] d_start;
  logic skip, last, is_loop, is_given, full, low;

  assign is_loop = opcode_of(in) == OP_LOOP_WS;
  assign is_given = opcode_of(in) inside {OP_LOOP_WS_BOUNDS, OP_LOOP_WS_ADDRESSES_AB, OP_LOOP_WS_ADDRESSES_DC,
      OP_LOOP_WS_STRIDES_AB, OP_LOOP_WS_STRIDES_DC};
  assign blocks_i = loop_ws_bounds_i(bounds);
  assign blocks_j = loop_ws_bounds_j(bounds);
  assign blocks_k = loop_ws_bounds_k(bounds);
  assign full = loop_ws_full(now);
  assign low = loop_ws_low_bias(now);
  assign d_start = loop_ws_addresses_dc_d(dc);
  assign rows = i + 1 == blocks_i ? 16'(DIM) - loop_ws_bounds_pad_i(bounds) : 16'(DIM);
  assign cols = j + 1 == blocks_j ? 16'(DIM) - loop_ws_bounds_pad_j(bounds) : 16'(DIM);
  assign depth = k + 1 == blocks_k ? 16'(DIM) - loop_ws_bounds_pad_k(bounds) : 16'(DIM);
  assign a_local = (32'(i) * 32'(blocks_k) + 32'(k)) * DIM;
  assign b_local = SP_ROWS - 32'(blocks_k) * 32'(blocks_j) * DIM + (32'(k) * 32'(blocks_j) + 32'(j)) * DIM;
  assign c_local = ACC | (32'(i) * 32'(blocks_j) + 32'(j)) * DIM;
  assign last = i + 1 == blocks_i && j + 1 == blocks_j && k + 1 == blocks_k && step == 10;

  always_comb begin
    out = in;
    skip = 0;
    out_valid = in_valid && !is_loop && !is_given;
    in_ready = !busy && (is_loop || is_given || out_ready);
    if (busy) begin
      out_valid = 1;
      case (step)
        0: out = make_config_ex(1);
        1: out = make_config_ld(0, 0, 0, ONE, loop_ws_strides_ab_a(strides_ab));
        2: out = make_config_ld(0, 1, 0, ONE, loop_ws_strides_ab_b(strides_ab));
        3: out = make_config_ld(low, 2, 0, ONE, loop_ws_strides_dc_d(strides_dc));
        4: out = make_config_st(loop_ws_relu(now), 0, 0, 0, 0, 0, 0, 0, 0, 0,
                                loop_ws_strides_dc_c(strides_dc), loop_ws_scale(now));
        5: begin
          skip = k != 0 || d_start == 0;
          out = make_mvin3(d_start + 48'(i) * DIM * 48'(loop_ws_strides_dc_d(strides_dc))
                           + 48'(j) * DIM * (low ? 1 : 4), c_local, cols, rows);
        end
        6: begin
          skip = i != 0;
          out = make_mvin2(loop_ws_addresses_ab_b(ab) + 48'(k) * DIM * 48'(loop_ws_strides_ab_b(strides_ab))
                           + 48'(j) * DIM, b_local, cols, depth);
        end
        7: begin
          skip = j != 0;
          out = make_mvin(loop_ws_addresses_ab_a(ab) + 48'(i) * DIM * 48'(loop_ws_strides_ab_a(strides_ab))
                          + 48'(k) * DIM, a_local, depth, rows);
        end
        8: out = make_preload(i == 0 ? b_local : NONE, cols, depth,
                              c_local | (k != 0 || d_start != 0 ? ADD : 0), cols, rows);
        9: out = i == 0 ? make_compute_preloaded(a_local, depth, rows, NONE)
                        : make_compute_accumulated(a_local, depth, rows, NONE);
        default: begin
          skip = k + 1 != blocks_k;
          out = make_mvout(loop_ws_addresses_dc_c(dc) + 48'(i) * DIM * 48'(loop_ws_strides_dc_c(strides_dc))
                           + 48'(j) * DIM * (full ? 4 : 1), c_local | (full ? FULL : 0), cols, rows);
        end
      endcase
      out_valid = !skip;
    end
  end

  always_ff @(posedge clk) begin
    if (in_valid && in_ready)
      case (opcode_of(in))
        OP_LOOP_WS_BOUNDS: bounds <= in;
        OP_LOOP_WS_ADDRESSES_AB: ab <= in;
        OP_LOOP_WS_ADDRESSES_DC: dc <= in;
        OP_LOOP_WS_STRIDES_AB: strides_ab <= in;
        OP_LOOP_WS_STRIDES_DC: strides_dc <= in;
        OP_LOOP_WS: begin
          now <= in;
          busy <= 1;
          step <= 0;
          i <= 0;
          j <= 0;
          k <= 0;
        end
        default: ;
      endcase
    if (busy && (skip || out_ready)) begin
      step <= step + 1;
      if (step == 10) begin
        step <= 5;
        i <= i + 1;
        if (i + 1 == blocks_i) begin
          i <= 0;
          j <= j + 1;
          if (j + 1 == blocks_j) begin
            j <= 0;
            k <= k + 1;
          end
        end
      end
      if (last) busy <= 0;
    end
    if (reset) busy <= 0;
  end
endmodule
