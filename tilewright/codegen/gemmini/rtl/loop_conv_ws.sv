// A whole convolution as primitive instructions, one a cycle, in five phases behind the configuration:
//   data      for block, y: runs of pixels in x that exist, or do not (zeros)
//   weights   for tap, block, out block
//   bias      for out block, pixels
//   computes  for tap, block, out block, row, column: preload, compute
//   stores    for out block, row, column
module loop_conv_ws import gemmini_fields::*; #(parameter int DIM = 16, SP_ROWS = 1024) (
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
  typedef enum logic [2:0] {CONFIG, DATA, WEIGHTS, BIAS, PRELOAD, COMPUTE, STORE} phase_t;

  instruction_t image, window, operands, results, pitches, now;
  logic busy;
  phase_t phase;
  logic [2:0] step;
  logic [15:0] block, j, y, x, kr, kc;  // x, y: pixels of data or of results

  logic is_loop, is_given, full;
  logic [15:0] in_rows, in_cols, in_channels, out_channels, out_rows, out_cols, kernel_rows, kernel_cols, stride;
  logic [15:0] top, left;
  assign is_loop = opcode_of(in) == OP_LOOP_CONV_WS;
  assign is_given = opcode_of(in) inside {OP_LOOP_CONV_WS_IMAGE, OP_LOOP_CONV_WS_WINDOW, OP_LOOP_CONV_WS_OPERANDS,
      OP_LOOP_CONV_WS_RESULTS, OP_LOOP_CONV_WS_PITCHES};
  assign in_rows = loop_conv_ws_image_in_rows(image);
  assign in_cols = loop_conv_ws_image_in_cols(image);
  assign in_channels = loop_conv_ws_image_in_channels(image);
  assign out_channels = loop_conv_ws_image_out_channels(image);
  assign out_rows = loop_conv_ws_window_out_rows(window);
  assign out_cols = loop_conv_ws_window_out_cols(window);
  assign kernel_rows = 16'(loop_conv_ws_window_kernel_rows(window));
  assign kernel_cols = 16'(loop_conv_ws_window_kernel_cols(window));
  assign stride = 16'(loop_conv_ws_window_stride(window));
  assign top = 16'(loop_conv_ws_window_top(window));
  assign left = 16'(loop_conv_ws_window_left(window));
  assign full = loop_conv_ws_full(now);

  // -- extents
  logic [15:0] blocks, out_blocks, height, width, depth, cols;
  logic [31:0] pixels, taps, tap;
  assign blocks = (in_channels + 16'(DIM - 1)) / 16'(DIM);
  assign out_blocks = (out_channels + 16'(DIM - 1)) / 16'(DIM);
  assign height = (out_rows - 1) * stride + kernel_rows;
  assign width = (out_cols - 1) * stride + kernel_cols;
  assign pixels = 32'(out_rows) * 32'(out_cols);
  assign taps = 32'(kernel_rows) * 32'(kernel_cols);
  assign tap = 32'(kr) * 32'(kernel_cols) + 32'(kc);
  assign depth = block + 1 == blocks ? in_channels - block * 16'(DIM) : 16'(DIM);
  assign cols = j + 1 == out_blocks ? out_channels - j * 16'(DIM) : 16'(DIM);

  function automatic logic [15:0] at_most_dim(input logic [15:0] rest);
    return rest < 16'(DIM) ? rest : 16'(DIM);
  endfunction

  // A run of data pixels that exist or do not.
  logic exists;
  logic [15:0] run;
  always_comb begin
    exists = y >= top && y < top + in_rows && x >= left && x < left + in_cols;
    if (y < top || y >= top + in_rows || x >= left + in_cols) run = at_most_dim(width - x);
    else if (x < left) run = at_most_dim(left < width ? left - x : width - x);
    else run = at_most_dim(left + in_cols < width ? left + in_cols - x : width - x);
  end

  logic [15:0] part;  // columns of results, or pixels of a bias
  logic [31:0] data_local, weight_local, result_local;
  logic [47:0] data_dram, weight_dram, result_dram;
  assign part = at_most_dim(out_cols - x);
  assign data_local = (32'(block) * 32'(height) + 32'(y)) * 32'(width) + 32'(x);
  assign weight_local = SP_ROWS - taps * 32'(blocks) * 32'(out_blocks) * DIM
      + ((tap * 32'(blocks) + 32'(block)) * 32'(out_blocks) + 32'(j)) * DIM;
  assign result_local = ACC | (32'(j) * pixels + 32'(y) * 32'(out_cols) + 32'(x));
  assign data_dram = loop_conv_ws_operands_data(operands)
      + (48'(y) - 48'(top)) * 48'(loop_conv_ws_pitches_data_row(pitches))
      + (48'(x) - 48'(left)) * 48'(loop_conv_ws_pitches_data(pitches)) + 48'(block) * DIM;
  assign weight_dram = loop_conv_ws_operands_weights(operands)
      + (48'(tap) * 48'(in_channels) + 48'(block) * DIM) * 48'(loop_conv_ws_weights_pitch(now)) + 48'(j) * DIM;
  assign result_dram = loop_conv_ws_results_results(results)
      + 48'(y) * 48'(loop_conv_ws_pitches_results_row(pitches))
      + 48'(x) * 48'(loop_conv_ws_pitches_results(pitches)) + 48'(j) * DIM * (full ? 4 : 1);

  logic has_bias, start;  // start: of the weights
  assign has_bias = loop_conv_ws_results_bias(results) != 0;
  assign start = y == 0 && x == 0;
  always_comb begin
    out = in;
    out_valid = in_valid && !is_loop && !is_given;
    in_ready = !busy && (is_loop || is_given || out_ready);
    if (busy) begin
      out_valid = 1;
      case (phase)
        CONFIG:
          case (step)
            0: out = make_config_ex(stride);
            1: out = make_config_ld(0, 0, 0, ONE, loop_conv_ws_pitches_data(pitches));
            2: out = make_config_ld(0, 1, 0, ONE, loop_conv_ws_weights_pitch(now));
            3: out = make_config_ld(0, 2, 0, ONE, 0);
            default: out = make_config_st(loop_conv_ws_relu(now), 0, 0, 0, 0, 0, 0, 0, 0, 0,
                                          loop_conv_ws_pitches_results(pitches), loop_conv_ws_scale(now));
          endcase
        DATA: out = make_mvin(exists ? data_dram : 0, data_local, depth, run);
        WEIGHTS: out = make_mvin2(weight_dram, weight_local, cols, depth);
        BIAS: out = make_mvin3(loop_conv_ws_results_bias(results) + 48'(j) * DIM * 4, result_local, cols, part);
        PRELOAD: out = make_preload(start ? weight_local : NONE, cols, depth,
                                    result_local | (has_bias || tap != 0 || block != 0 ? ADD : 0), cols, part);
        COMPUTE: begin
          out = make_compute_accumulated(
              (32'(block) * 32'(height) + 32'(y) * 32'(stride) + 32'(kr)) * 32'(width)
                  + 32'(x) * 32'(stride) + 32'(kc), depth, part, NONE);
          if (start) out = make_compute_preloaded(
              (32'(block) * 32'(height) + 32'(kr)) * 32'(width) + 32'(kc), depth, part, NONE);
        end
        default: out = make_mvout(result_dram, result_local | (full ? FULL : 0), cols, part);
      endcase
    end
  end

  // -- the nest: each phase walks some of the counters
  logic last_x, last_y, last_j, last_block, last_tap, over_results, last;
  assign over_results = phase inside {BIAS, COMPUTE, STORE};
  assign last_x = over_results ? x + part == out_cols : phase != DATA || x + run == width;
  assign last_y = over_results ? y + 1 == out_rows : phase != DATA || y + 1 == height;
  assign last_j = phase == DATA || j + 1 == out_blocks;
  assign last_block = phase inside {BIAS, STORE} || block + 1 == blocks;
  assign last_tap = phase inside {DATA, BIAS, STORE} || (kr + 1 == kernel_rows && kc + 1 == kernel_cols);
  assign last = last_x && last_y && last_j && last_block && last_tap;

  always_ff @(posedge clk) begin
    if (in_valid && in_ready)
      case (opcode_of(in))
        OP_LOOP_CONV_WS_IMAGE: image <= in;
        OP_LOOP_CONV_WS_WINDOW: window <= in;
        OP_LOOP_CONV_WS_OPERANDS: operands <= in;
        OP_LOOP_CONV_WS_RESULTS: results <= in;
        OP_LOOP_CONV_WS_PITCHES: pitches <= in;
        OP_LOOP_CONV_WS: begin
          now <= in;
          busy <= 1;
          phase <= CONFIG;
          step <= 0;
        end
        default: ;
      endcase
    if (busy && out_ready) begin
      if (phase == CONFIG) begin
        step <= step + 1;
        if (step == 4) phase <= DATA;
      end else if (phase == PRELOAD) phase <= COMPUTE;
      else begin
        if (phase == COMPUTE) phase <= PRELOAD;
        x <= x + (phase == DATA ? run : part);
        if (last_x) begin
          x <= 0;
          y <= y + 1;
          if (last_y) begin
            y <= 0;
            j <= j + 1;
            if (last_j) begin
              j <= 0;
              block <= block + 1;
              if (last_block) begin
                block <= 0;
                kc <= kc + 1;
                if (kc + 1 == kernel_cols) begin
                  kc <= 0;
                  kr <= kr + 1;
                end
              end
            end
          end
        end
        if (last) begin
          kr <= 0;
          kc <= 0;
          case (phase)
            DATA: phase <= WEIGHTS;
            WEIGHTS: phase <= has_bias ? BIAS : PRELOAD;
            BIAS: phase <= PRELOAD;
            COMPUTE: phase <= STORE;
            default: busy <= 0;
          endcase
        end
      end
    end
    if (reset) begin
      busy <= 0;
      x <= 0;
      y <= 0;
      j <= 0;
      block <= 0;
      kr <= 0;
      kc <= 0;
    end
  end
endmodule
