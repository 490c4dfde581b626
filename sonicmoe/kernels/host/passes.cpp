// The passes of an FP8 engine: each is one call from Python that launches all kernels of its stage.
//
// Why one call: a launch from Python costs the host several microseconds for its arguments alone,
// more than the launch itself. Below about 2048 tokens a GPU would wait for that, so Python makes
// three calls for a layer's step: forward, dgated, wgrad. Where memory is to be freed stage by
// stage, dgrad is a call of its own, and dw2 and dw1 are in place of wgrad.
//
// This file holds no kernel and no architecture: the kernels are functions of other modules, which
// check what they need themselves. A pass takes the handles of `handles.hpp`, an observer, the
// stream, how many multiprocessors its GEMMs may take (0: all), its settings, its destinations, and
// then its own tensors in the order of its table. Python learns all those names from
// `argument_names` and passes everything by keyword.
//
// A weight gradient goes to a destination, dw1, which is an object of the module whose kernel adds
// to it; nothing in here looks into it. Such a pass is told I by a number, `inner`, because a
// destination does not say it.
//
// Tokens, and gradients of tokens, are values that a pass quantises, or codes with one scale per
// 128 columns of a row (x_codes, x_scale) that somebody has quantised before. One of the two is
// given.
//
// z is kept in 8-bit codes (z, z_scale) or in bf16 (z_rows): the kernels are built for one of them.
//
// Biases lie in the weights' handle. dgated sums their gradients too, where it is given memory for
// them (db1, db2): later there are no codes of dz by rows, nor always values of dout.
//
// Factors of low-rank adapters lie in the weights' handle too: as forward reads them, or transposed
// for the backward. Passes write the narrow products: u (up_u, down_u) in forward, v (down_v, up_v) in
// dgated, which then goes on to dx. dgated sums the gradients of the second factors too (d_up_b,
// d_down_b), because it reads the same codes for v; `adapters` sums those of the first.
//
// An observer is called with
//   "begin" | "end", stage                             around the launches of a stage
//   "show", stage, dtype, MATRIX                        a plain matrix that later launches read
//   "show_quantised", stage, code, block rows, block columns, transposed, MATRIX, MATRIX
//                                                       codes and their scales
// where MATRIX is: field of the call, offset in elements, rows, columns. The matrix lies in a
// tensor that the caller has passed under that name, so the caller can make a view of it without
// asking for an address. What the observer writes there, later launches read.
#include <tvm/ffi/container/map.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "arena.hpp"

namespace sonicmoe {
namespace {

using tvm::ffi::Any;
using tvm::ffi::Array;
using tvm::ffi::Function;
using tvm::ffi::Map;
using tvm::ffi::Shape;
using tvm::ffi::String;

template <class Layout>
constexpr Field scratch_field(std::string_view name, bool optional = false) {
  return {name, Element::kCodes, {kAnySize}, optional, bytes_of<Layout>};
}

// Tokens: in their own type, or as codes with scales.
constexpr Field kXTokens{"x", Element::kTokens, {T, H}, kOptional};
constexpr Field kXCodes{"x_codes", Element::kCodes, {T, H}, kOptional};
constexpr Field kXScale{"x_scale", Element::kFloat, {T, HBlocks}, kOptional};
constexpr Field kDoutTokens{"dout", Element::kTokens, {T, H}, kOptional};
constexpr Field kDoutCodes{"dout_codes", Element::kCodes, {T, H}, kOptional};
constexpr Field kDoutScale{"dout_scale", Element::kFloat, {T, HBlocks}, kOptional};

constexpr FieldTable kForwardTable{
    "forward",
    {{
        kXTokens,
        kXCodes,
        kXScale,
        {"z", Element::kCodes, {R, TwoI}, kOptional},  // None: not stored
        {"z_scale", Element::kFloat, {R, TwoIBlocks}, kOptional},
        {"z_rows", Element::kBfloat, {R, TwoI}, kOptional},
        {"out", Element::kTokens, {T, H}, kOptional},  // None: the pass ends at z
        scratch_field<UpScratch>("scratch"),           // with `out` that of ForwardScratch
        {"up_u", Element::kBfloat, {R, kAnySize}, kOptional},
        {"down_u", Element::kBfloat, {R, kAnySize}, kOptional},
    }}};

constexpr Field factor_gradient(std::string_view name, std::array<Axis, 3> shape) {
  return {name, Element::kFloat, shape, kOptional, nullptr, true};
}

// The operands of wgrad are quantised and token-major (dz, y1s), or rows in bf16 (dz_rows,
// y1s_rows) for weight gradients that are not computed in FP8. With `dx` the pass goes on to it, as
// dgrad does. What either half scratches then lies behind dz_scratch.
constexpr FieldTable kDgatedTable{"dgated",
                                  {{
                                      kDoutTokens,
                                      kDoutCodes,
                                      kDoutScale,
                                      {"z", Element::kCodes, {R, TwoI}, kOptional},
                                      {"z_scale", Element::kFloat, {R, TwoIBlocks}, kOptional},
                                      {"z_rows", Element::kBfloat, {R, TwoI}, kOptional},
                                      scratch_field<WgradDz>("dz", kOptional),
                                      scratch_field<WgradY1s>("y1s", kOptional),
                                      {"dz_rows", Element::kBfloat, {R, TwoI}, kOptional},
                                      {"y1s_rows", Element::kBfloat, {R, I}, kOptional},
                                      {"dprobs", Element::kFloat, {T, K}},
                                      scratch_field<DzScratch>("dz_scratch"),
                                      scratch_field<DoutScratch>("dout_scratch", kOptional),
                                      {"dx", Element::kTokens, {T, H}, kOptional},
                                      {"db1", Element::kFloat, {E, TwoI}, kOptional},
                                      {"db2", Element::kFloat, {E, H}, kOptional},
                                      // scratch of either
                                      {"bias_parts", Element::kFloat, {RBlocks, kAnySize}, kOptional},
                                      {"up_u", Element::kBfloat, {R, kAnySize}, kOptional},
                                      {"up_v", Element::kBfloat, {R, kAnySize}, kOptional},
                                      {"down_u", Element::kBfloat, {R, kAnySize}, kOptional},
                                      {"down_v", Element::kBfloat, {R, kAnySize}, kOptional},
                                      factor_gradient("d_up_b", {E, TwoI, kAnySize}),
                                      factor_gradient("d_down_b", {E, H, kAnySize}),
                                      {"parts", Element::kFloat, {kAnySize}, kOptional},  // of each
                                  }}};

constexpr FieldTable kDgradTable{"dgrad",
                                 {{
                                     {"dx", Element::kTokens, {T, H}},
                                     scratch_field<DzScratch>("dz_scratch"),
                                     scratch_field<DxScratch>("scratch"),
                                     {"up_v", Element::kBfloat, {R, kAnySize}, kOptional},
                                 }}};

constexpr FieldTable kWgradTable{"wgrad",
                                 {{
                                     kXTokens,
                                     kXCodes,
                                     kXScale,
                                     kDoutTokens,
                                     kDoutCodes,
                                     kDoutScale,
                                     scratch_field<WgradDz>("dz"),
                                     scratch_field<WgradY1s>("y1s"),
                                     scratch_field<TokenPairScratch>("scratch"),
                                 }}};

constexpr FieldTable kDw1Table{"dw1",
                               {{
                                   kXTokens,
                                   kXCodes,
                                   kXScale,
                                   scratch_field<WgradDz>("dz"),
                                   scratch_field<TokensScratch>("scratch"),
                               }}};

constexpr FieldTable kDw2Table{"dw2",
                               {{
                                   kDoutTokens,
                                   kDoutCodes,
                                   kDoutScale,
                                   scratch_field<WgradY1s>("y1s"),
                                   scratch_field<TokensScratch>("scratch"),
                               }}};

// y1s as dgated left it: codes, or rows. A gradient that is None is not summed.
constexpr FieldTable kAdaptersTable{
    "adapters",
    {{
        kXTokens,
        kXCodes,
        kXScale,
        scratch_field<WgradY1s>("y1s", kOptional),
        {"y1s_rows", Element::kBfloat, {R, I}, kOptional},
        {"up_v", Element::kBfloat, {R, kAnySize}, kOptional},
        {"down_v", Element::kBfloat, {R, kAnySize}, kOptional},
        factor_gradient("d_up_a", {E, kAnySize, H}),
        factor_gradient("d_down_a", {E, kAnySize, I}),
        {"parts", Element::kFloat, {kAnySize}, kOptional},  // scratch of each
    }}};

// The kernels that passes launch, by the names under which their modules export them.
constexpr std::array kKernelNames = {
    "quantize_rows",
    "gather_gated_gemm",
    "grouped_gemm",
    "aggregate_rows",
    "gather_dgated_gemm",
    "sum_or_zero",
    "gather_transpose_quantize",
    "gather_transpose_quantize_pair",
    "gather_transpose_requantize",
    "grouped_wgrad",
    "sum_dz",  // this and the next one are None where no layer has biases
    "sum_tokens",
    "narrow_rows",  // and these where none has adapters
    "narrow_gradient",
    "narrow_both",
};

// A pass: its arguments, and the function that launches its kernels.
class Run;
struct Pass {
  std::array<const char*, 5> settings;   // names of the numbers that it takes, then nulls
  std::array<const char*, 2> gradients;  // that have a destination, then nulls
  const FieldTable* table;
  void (*run)(const Run&);

  int num_settings() const {
    return static_cast<int>(std::find(settings.begin(), settings.end(), nullptr) -
                            settings.begin());
  }
  int num_gradients() const { return (gradients[0] != nullptr) + (gradients[1] != nullptr); }
};

class Kernels {
 public:
  explicit Kernels(const PackedArgs& arguments, int begin) {
    if (arguments.size() - begin != static_cast<int>(kKernelNames.size()))
      TVM_FFI_THROW(TypeError) << "a pass needs " << kKernelNames.size() << " kernels, got "
                               << arguments.size() - begin;
    for (size_t i = 0; i < kKernelNames.size(); ++i)
      functions_.push_back(
          arguments[begin + static_cast<int>(i)].cast<Optional<Function>>().value_or(Function()));
  }
  const Function& operator[](std::string_view name) const {
    for (size_t i = 0; i < kKernelNames.size(); ++i)
      if (name == kKernelNames[i] && functions_[i] != nullptr) return functions_[i];
    TVM_FFI_THROW(InternalError) << "there is no kernel " << std::string(name);
    return functions_[0];
  }

 private:
  std::vector<Function> functions_;
};

// One run of a pass: its arguments, checked against each other.
class Run {
  const Weights weights_;
  const Routing routing_;
  const Optional<Function> observer_;
  const Pass& pass_;
  std::array<Any, 2> destinations_;

 public:
  static constexpr int kHead = 5;  // arguments before the settings: see `argument_names`

  Run(const Pass& pass, const Kernels& kernels, const PackedArgs& all)
      : weights_(all[0].cast<Weights>()),
        routing_(all[1].cast<Routing>()),
        observer_(all[2].cast<Optional<Function>>()),
        pass_(pass),
        kernel(kernels),
        stream(all[3].cast<int64_t>()),
        multiprocessors(all[4].cast<int64_t>()),
        setting(pass.num_settings() > 0 ? all[kHead].cast<int64_t>() : 0),
        first(pass.num_settings() > 1 ? all[kHead + 1].cast<double>() : 0.),
        second(pass.num_settings() > 2 ? all[kHead + 2].cast<double>() : 0.),
        up_scale(pass.num_settings() > 3 ? all[kHead + 3].cast<double>() : 0.),
        down_scale(pass.num_settings() > 4 ? all[kHead + 4].cast<double>() : 0.),
        sizes(joined(weights_, routing_, inner(all))),
        call(*pass.table, all, first_destination() + pass.num_gradients(), sizes) {
    for (int i = 0; i < pass.num_gradients(); ++i) {
      const char* gradient = pass.gradients[i];
      destinations_[i] = all[first_destination() + i];
      if (destinations_[i] == nullptr)
        TVM_FFI_THROW(ValueError) << pass.table->handle << ": " << gradient
                                  << " is None; needed: a destination";
    }
  }
  Run(const Run&) = delete;

  const Kernels& kernel;
  const int64_t stream, multiprocessors, setting;
  const double first, second;  // parameters of an activation
  const double up_scale, down_scale;  // of adapters
  Sizes sizes;
  Call call;

  TensorView weight(const char* name) const {
    if (!weights_.defined()) TVM_FFI_THROW(ValueError) << "weights are None; needed: " << name;
    return (*weights_.get())[name];
  }
  // A bias, or a factor of an adapter.
  Optional<TensorView> bias(const char* name) const {
    return weights_.defined() ? weights_->find(name) : Optional<TensorView>();
  }
  TensorView route(const char* name) const { return (*routing_.get())[name]; }
  Matrix given(const char* name) const { return {call[name], name, 0}; }
  const char* name() const { return pass_.table->handle.data(); }
  const Any& into(std::string_view gradient) const {
    return destinations_[gradient == pass_.gradients[0] ? 0 : 1];
  }

  template <class Launches>
  void stage(const char* name, Launches launches) const {
    if (observer_) observer_.value()("begin", name);
    launches();
    if (observer_) observer_.value()("end", name);
  }
  void show(const char* name, const char* dtype, const Matrix& m) const {
    if (!observer_) return;
    observer_.value()("show", name, dtype, m.field.data(), m.offset, m.view.size(0),
                      m.view.size(1));
  }
  void show(const char* name, const Quantized& q) const {
    if (!observer_) return;
    if (q.format == nullptr) return show(name, "bfloat16", q.codes);  // rows that have no codes
    const Format& f = *q.format;
    const TensorView &codes = q.codes.view, &scale = q.scale.view;
    observer_.value()("show_quantised", name, f.code, f.block_rows, f.block_columns, f.transposed,
                      q.codes.field.data(), q.codes.offset, codes.size(0), codes.size(1),
                      q.scale.field.data(), q.scale.offset, scale.size(0), scale.size(1));
  }

 private:
  int first_destination() const {
    return kHead + pass_.num_settings() + (pass_.num_gradients() > 0);
  }
  int64_t inner(const PackedArgs& all) const {
    return pass_.num_gradients() > 0 ? all[first_destination() - 1].cast<int64_t>() : -1;
  }
  static Sizes joined(const Weights& weights, const Routing& routing, int64_t inner) {
    if (!routing.defined()) TVM_FFI_THROW(ValueError) << "routing is None; needed: its handle";
    Sizes sizes = routing->sizes();
    if (inner >= 0) sizes.learn('I', inner, "inner");
    if (weights.defined()) join(sizes, weights->sizes(), "weights");
    return sizes;
  }
};

// The fields that tokens, or their gradients, come in, and what their stages are called.
struct TokenFields {
  const char *values, *codes, *scale;
  const char *quantize_stage, *shown, *wgrad_operand;
};
constexpr TokenFields kX{"x", "x_codes", "x_scale", "quantize_x", "x_fp8", "wgrad_x"};
constexpr TokenFields kDout{"dout",          "dout_codes", "dout_scale",
                            "quantize_dout", "dout_fp8",   "wgrad_dout"};

bool came_quantised(const Run& run, const TokenFields& fields) {
  const bool codes = run.call.has(fields.codes);
  if (run.call.has(fields.scale) != codes || run.call.has(fields.values) == codes)
    TVM_FFI_THROW(ValueError) << run.name() << ": needed: either " << fields.values << ", or "
                              << fields.codes << " and " << fields.scale;
  return codes;
}

// Tokens as they came, or quantised into `scratch`.
Quantized quantised(const Run& run, const TokenFields& fields, const Quantized& scratch) {
  Quantized q = scratch;
  if (came_quantised(run, fields)) {
    q = {run.given(fields.codes), run.given(fields.scale), &kTokenFormat};
  } else {
    const TensorView values = run.call[fields.values];
    run.stage(fields.quantize_stage, [&] {
      if (values.numel() > 0)
        run.kernel["quantize_rows"](values, q.codes.view, q.scale.view, run.stream);
    });
  }
  run.show(fields.shown, q);
  return q;
}

// z as the caller gave it; what it lacks is `unread`, which no kernel looks at.
Quantized kept_z(const Run& run, const Quantized& unread) {
  const bool codes = run.call.has("z"), rows = run.call.has("z_rows");
  if (run.call.has("z_scale") != codes || (codes && rows))
    TVM_FFI_THROW(ValueError) << run.name() << ": needed: z and z_scale, or z_rows";
  if (codes) return {run.given("z"), run.given("z_scale"), &kZFormat};
  return {rows ? run.given("z_rows") : unread.codes, unread.scale, nullptr};
}

// u or v of an adapter, where the handle of the weights has this factor of it: by * rows * factor^T.
// gathers: rows are those of tokens.
void project(const Run& run, const char* factor, const Quantized& rows, bool gathers,
             const char* field, double by) {
  const Optional<TensorView> given = run.bias(factor);
  if (!given.has_value()) return;
  run.stage("low_rank", [&] {
    run.kernel["narrow_rows"](rows.codes.view, rows.scale.view, gathers, given,
                              run.route("row_token"), run.route("padded_offsets"),
                              run.call[field], by, run.stream);
  });
}

// v of an adapter, where the handle of the weights has this factor of it, and the gradient of that
// factor from u, of one reading of the rows.
template <class Prob>
void project_back(const Run& run, const char* factor, const Quantized& rows, bool gathers,
                  const char* v, const char* u, const Prob& row_prob, const char* gradient,
                  double by) {
  const Optional<TensorView> given = run.bias(factor);
  if (!given.has_value()) return;
  run.stage("low_rank", [&] {
    run.kernel["narrow_both"](rows.codes.view, rows.scale.view, gathers, given, run.call[u],
                              row_prob, run.route("row_token"), run.route("padded_offsets"),
                              run.call.find("parts"), run.call[v], run.call[gradient], by,
                              run.stream);
  });
}

// x, then z and y1, then y2, then out. Without `out` it ends at z, which a backward that saved none
// asks for.
void forward(const Run& run) {
  const bool store_z = run.call.has("z") || run.call.has("z_rows"), whole = run.call.has("out");
  Arena arena("scratch", run.call["scratch"]);
  const UpScratch t(arena, run.sizes);
  const Quantized z = kept_z(run, t.y1), x = quantised(run, kX, t.x);
  project(run, "up_a", x, true, "up_u", run.up_scale);
  run.stage("up", [&] {
    run.kernel["gather_gated_gemm"](
        x.codes.view, x.scale.view, run.weight("w1"), run.weight("w1_scale"), run.bias("b1"),
        run.call.find("up_u"), run.bias("up_b"), run.route("row_token"), run.route("padded_offsets"), z.codes.view, z.scale.view,
        t.y1.codes.view, t.y1.scale.view, run.setting, run.first, run.second, store_z,
        run.multiprocessors, run.stream);
  });
  if (store_z) run.show("z", z);
  run.show("y1", t.y1);
  if (!whole) return;
  const Matrix y2 = arena.matrix(run.sizes['R'], run.sizes['H'], kBrain);
  project(run, "down_a", t.y1, false, "down_u", run.down_scale);
  run.stage("down", [&] {
    run.kernel["grouped_gemm"](t.y1.codes.view, t.y1.scale.view, run.weight("w2"),
                               run.weight("w2_scale"), run.bias("b2"), run.call.find("down_u"),
                               run.bias("down_b"), run.route("padded_offsets"), y2.view,
                               run.multiprocessors, run.stream);
  });
  run.show("y2", "bfloat16", y2);
  run.stage("aggregate_out", [&] {
    run.kernel["aggregate_rows"](y2.view, run.route("slot_row"), run.route("row_prob"),
                                 run.call["out"], true, run.stream);
  });
}

Quantized y1s_of(const Run& run, Arena& arena) {
  return WgradY1s(arena.in("y1s", run.call["y1s"]), run.sizes).y1s;
}

Arena& behind_dz(const Run& run, Arena& arena) {
  return arena.in("dz_scratch", run.call["dz_scratch"], bytes_of<DzScratch>(run.sizes));
}

// v: of an adapter of the up-projection.
void launch_dgrad(const Run& run, const Quantized& dz, const Matrix& dx_rows,
                  const Optional<TensorView>& v = {}) {
  run.stage("dx_gemm", [&] {
    const Optional<TensorView> factor = v.has_value() ? run.bias("up_a_t") : v;
    run.kernel["grouped_gemm"](dz.codes.view, dz.scale.view, run.weight("w1_dgrad"),
                               run.weight("w1_dgrad_scale"), Optional<TensorView>(), v, factor,
                               run.route("padded_offsets"), dx_rows.view, run.multiprocessors,
                               run.stream);
  });
  run.show("dx_rows", "bfloat16", dx_rows);
  run.stage("aggregate_dx", [&] {
    run.kernel["aggregate_rows"](dx_rows.view, run.route("slot_row"), run.route("row_prob"),
                                 run.call["dx"], false, run.stream);
  });
}

// dout as it came: values, or codes and their scales.
struct GivenDout {
  TensorView tokens;
  Optional<TensorView> scale;
  explicit GivenDout(const Run& run)
      : tokens(run.call[run.call.has("dout") ? "dout" : "dout_codes"]) {
    if (!run.call.has("dout")) scale = run.call["dout_scale"];
  }
};

// Of dout: <dout, b2> of every row, into its first partial sum of dprobs, and db2. The bias is not
// quantised, and neither is dout in these sums, unless it came so.
void sum_tokens(const Run& run, const Matrix& dprob_parts) {
  const Optional<TensorView> b2 = run.bias("b2");
  if (!b2.has_value()) return;
  const GivenDout dout(run);
  run.kernel["sum_tokens"](dout.tokens, dout.scale, b2, run.route("row_prob"),
                           run.route("row_token"), run.route("padded_offsets"), dprob_parts.view,
                           run.call.find("bias_parts"), run.call.find("db2"), run.stream);
}

void sum_dz(const Run& run, const Quantized& dz) {
  run.stage("biases", [&] {
    run.kernel["sum_dz"](dz.codes.view, dz.scale.view, run.route("row_token"),
                         run.route("padded_offsets"), run.call["bias_parts"], run.call["db1"],
                         run.stream);
  });
}

// dout, then everything that the gradient of the gated activation gives: dz in dz_scratch for
// dgrad, those operands of wgrad for which there is memory, and dprobs.
void dgated(const Run& run) {
  const bool in_rows = run.call.has("dz_rows"), has_dz = run.call.has("dz"),
             has_y1s = run.call.has("y1s");
  if (run.call.has("y1s_rows") != in_rows || (in_rows && has_y1s) || (has_dz && !has_y1s))
    TVM_FFI_THROW(ValueError)
        << "dgated: needed: dz and y1s, or dz_rows and y1s_rows, or y1s alone, or none of them";
  // All memory before the first launch.
  Arena dz_arena("dz_scratch", run.call["dz_scratch"]), dx_arena, dout_arena, of_dz, of_y1s;
  const DzScratch t(dz_arena, run.sizes);
  // In rows the operands have no scales; the kernel is handed something that it does not look at.
  const Matrix unread = t.dprob_parts;
  const Matrix dx_rows =
      run.call.has("dx") ? DxScratch(behind_dz(run, dx_arena), run.sizes).dx_rows : unread;
  if (!run.call.has("z") && !run.call.has("z_rows"))
    TVM_FFI_THROW(ValueError) << "dgated: needed: z and z_scale, or z_rows";
  const Quantized z = kept_z(run, {unread, unread, nullptr});
  Quantized dz{unread, t.no_scales, nullptr}, y1s = dz;
  if (in_rows) dz.codes = run.given("dz_rows"), y1s.codes = run.given("y1s_rows");
  if (has_dz) dz = WgradDz(of_dz.in("dz", run.call["dz"]), run.sizes).dz;
  if (has_y1s) y1s = y1s_of(run, of_y1s);
  const auto kept_codes = [&](bool is_kept, const Quantized& q) {
    return is_kept ? Optional<TensorView>(q.codes.view) : Optional<TensorView>();
  };
  if (!came_quantised(run, kDout)) {
    run.call.has("dout_scratch") ? dout_arena.in("dout_scratch", run.call["dout_scratch"])
                                 : behind_dz(run, dout_arena);
  }
  const Quantized dout = quantised(run, kDout, DoutScratch(dout_arena, run.sizes).dout);
  project_back(run, "down_b_t", dout, true, "down_v", "down_u", run.route("row_prob"), "d_down_b",
               run.down_scale);
  run.stage("dgated", [&] {
    run.kernel["gather_dgated_gemm"](
        dout.codes.view, dout.scale.view, run.weight("w2_dgrad"), run.weight("w2_dgrad_scale"),
        run.call.find("down_v"), run.bias("down_a_t"), run.route("row_token"), run.route("row_prob"), run.route("padded_offsets"), z.codes.view,
        z.scale.view, t.dz.codes.view, t.dz.scale.view, t.dprob_parts.view,
        kept_codes(in_rows || has_dz, dz), dz.scale.view, kept_codes(in_rows || has_y1s, y1s),
        y1s.scale.view, in_rows, run.setting, run.first, run.second, run.multiprocessors, run.stream);
    sum_tokens(run, t.dprob_parts);
    run.kernel["sum_or_zero"](run.route("slot_row"), t.dprob_parts.view, run.call["dprobs"],
                              run.stream);
  });
  run.show("dz_fp8", t.dz);
  run.show("ds", "float32", run.given("dprobs"));
  if (in_rows || has_dz) run.show("dz", dz);
  if (in_rows || has_y1s) run.show("y1s", y1s);
  if (run.call.has("db1")) sum_dz(run, t.dz);
  project_back(run, "up_b_t", t.dz, false, "up_v", "up_u", Optional<TensorView>(), "d_up_b",
               run.up_scale);
  if (run.call.has("dx")) launch_dgrad(run, t.dz, dx_rows, run.call.find("up_v"));
}

void dgrad(const Run& run) {
  Arena dz_arena("dz_scratch", run.call["dz_scratch"]), arena("scratch", run.call["scratch"]);
  launch_dgrad(run, DzScratch(dz_arena, run.sizes).dz, DxScratch(arena, run.sizes).dx_rows,
               run.call.find("up_v"));
}

// The gradient of a first factor: sums over an expert's rows of v^T rows. scale: None of values.
template <class Rows, class Scale>
void sum_factor(const Run& run, const char* gradient, const Rows& rows, const Scale& scale,
                bool gathers, bool transposed, const char* narrow) {
  const Optional<TensorView> none;
  run.kernel["narrow_gradient"](rows, scale, gathers, transposed, run.call[narrow], none,
                                run.route("row_token"), run.route("padded_offsets"), false,
                                run.call.find("parts"), run.call[gradient], run.stream);
}

void adapters(const Run& run) {
  const Optional<TensorView> none;
  run.stage("low_rank", [&] {
    if (run.call.has("d_up_a")) {
      const bool codes = came_quantised(run, kX);
      sum_factor(run, "d_up_a", run.call[codes ? kX.codes : kX.values],
                 codes ? run.call.find(kX.scale) : none, true, false, "up_v");
    }
    if (!run.call.has("d_down_a")) return;
    if (run.call.has("y1s_rows"))
      return sum_factor(run, "d_down_a", run.call["y1s_rows"], none, false, false, "down_v");
    Arena of_y1s;
    const Quantized y1s = y1s_of(run, of_y1s);
    sum_factor(run, "d_down_a", y1s.codes.view, y1s.scale.view, false, true, "down_v");
  });
}

// left^T right, left in the destination of that name.
void add_product(const Run& run, const char* gradient, const Quantized& left,
                 const Quantized& right) {
  run.stage(gradient, [&] {
    run.kernel["grouped_wgrad"](left.codes.view, left.scale.view, right.codes.view,
                                right.scale.view, run.route("padded_offsets"), run.into(gradient),
                                run.multiprocessors, run.stream);
  });
}

void add_dw1(const Run& run, const Quantized& x) {
  Arena arena("dz", run.call["dz"]);
  add_product(run, "dw1", WgradDz(arena, run.sizes).dz, x);
}

void add_dw2(const Run& run, const Quantized& dout) {
  Arena arena;
  add_product(run, "dw2", dout, y1s_of(run, arena));
}

// Tokens in expert order, transposed and quantised in blocks of that order.
void launch_operand(const Run& run, const TokenFields& fields, const Quantized& q) {
  const auto launch = [&](const char* kernel, const auto&... tokens) {
    run.kernel[kernel](tokens..., run.route("row_token"), run.route("padded_offsets"), q.codes.view,
                       q.scale.view, run.stream);
  };
  came_quantised(run, fields)
      ? launch("gather_transpose_requantize", run.call[fields.codes], run.call[fields.scale])
      : launch("gather_transpose_quantize", run.call[fields.values]);
}

// Both weight gradients; where both operands come as values, one launch reads the routing once.
void wgrad(const Run& run) {
  Arena arena("scratch", run.call["scratch"]);
  const TokenPairScratch t(arena, run.sizes);
  const Quantized &x = t.x.tokens, &dout = t.dout.tokens;
  run.stage("wgrad_operands", [&] {
    const bool x_quantised = came_quantised(run, kX), dout_quantised = came_quantised(run, kDout);
    if (x_quantised || dout_quantised) {
      launch_operand(run, kX, x);
      launch_operand(run, kDout, dout);
    } else {
      run.kernel["gather_transpose_quantize_pair"](
          run.call["x"], run.call["dout"], run.route("row_token"), run.route("padded_offsets"),
          x.codes.view, x.scale.view, dout.codes.view, dout.scale.view, run.stream);
    }
  });
  run.show(kX.wgrad_operand, x);
  run.show(kDout.wgrad_operand, dout);
  add_dw2(run, dout);
  add_dw1(run, x);
}

// One of the two, for stage-wise memory: the caller frees its operands before it asks for the
// other.
Quantized transposed(const Run& run, Arena& arena, const TokenFields& fields) {
  const Quantized q = TokensScratch(arena, run.sizes).tokens;
  run.stage("wgrad_operands", [&] { launch_operand(run, fields, q); });
  run.show(fields.wgrad_operand, q);
  return q;
}

void dw1(const Run& run) {
  Arena arena("scratch", run.call["scratch"]);
  add_dw1(run, transposed(run, arena, kX));
}

void dw2(const Run& run) {
  Arena arena("scratch", run.call["scratch"]);
  add_dw2(run, transposed(run, arena, kDout));
}

struct Scratch {
  const char* name;
  int64_t (*bytes)(const Sizes&);
};

constexpr std::array kScratches = {
    Scratch{"forward", bytes_of<ForwardScratch>},
    Scratch{"forward_to_z", bytes_of<UpScratch>},
    Scratch{"backward", bytes_of_backward},
    Scratch{"dz_scratch", bytes_of<DzScratch>},
    Scratch{"dout_scratch", bytes_of<DoutScratch>},
    Scratch{"dz", bytes_of<WgradDz>},
    Scratch{"y1s", bytes_of<WgradY1s>},
    Scratch{"dgrad", bytes_of<DxScratch>},
    Scratch{"wgrad", bytes_of<TokenPairScratch>},
    Scratch{"dw1", bytes_of<TokensScratch>},
    Scratch{"dw2", bytes_of<TokensScratch>},
};

constexpr std::array kPasses = {
    Pass{{"activation", "first", "second", "up_scale", "down_scale"}, {}, &kForwardTable, forward},
    Pass{{"activation", "first", "second", "up_scale", "down_scale"}, {}, &kDgatedTable, dgated},
    Pass{{}, {}, &kDgradTable, dgrad},
    Pass{{}, {"dw1", "dw2"}, &kWgradTable, wgrad},
    Pass{{}, {"dw1"}, &kDw1Table, dw1},
    Pass{{}, {"dw2"}, &kDw2Table, dw2},
    Pass{{}, {}, &kAdaptersTable, adapters},
};

const Pass& pass_named(const std::string& name) {
  for (const Pass& pass : kPasses)
    if (name == pass.table->handle) return pass;
  TVM_FFI_THROW(ValueError) << "there is no pass " << name;
  return kPasses[0];
}

void append(Array<String>& names, const FieldTable& table) {
  for (int i = 0; i < table.size; ++i) names.push_back(String(table.fields[i].name.data()));
}

// Names of the arguments of "kernels", "weights", "routing" or a pass, in the order in which the
// function takes them; or of the sizes that `scratch_sizes` returns.
Array<String> argument_names(const String& what) {
  Array<String> names;
  if (what == "kernels") {
    for (const char* name : kKernelNames) names.push_back(name);
  } else if (what == "scratches") {
    for (const Scratch& scratch : kScratches) names.push_back(scratch.name);
  } else if (what == "weights" || what == "routing") {
    append(names, what == "weights" ? kWeightsTable : kRoutingTable);
  } else {
    const Pass& pass = pass_named(what);
    names = {"weights", "routing", "observer", "stream", "multiprocessors"};
    for (int i = 0; i < pass.num_settings(); ++i) names.push_back(pass.settings[i]);
    if (pass.num_gradients() > 0) names.push_back("inner");
    for (int i = 0; i < pass.num_gradients(); ++i)
      names.push_back(pass.gradients[i]);
    append(names, *pass.table);
  }
  return names;
}

// make_pass(name, kernels...): the pass of that name over these kernels.
Function make_pass() {
  return Function::FromPacked([](PackedArgs arguments, Any* result) {
    const Pass& pass = pass_named(arguments[0].cast<String>());
    const auto kernels = std::make_shared<const Kernels>(arguments, 1);
    *result = Function::FromPacked([&pass, kernels](PackedArgs of_call, Any*) {
      if (of_call.size() <= Run::kHead)
        TVM_FFI_THROW(TypeError) << pass.table->handle << " got " << of_call.size() << " arguments";
      pass.run(Run(pass, *kernels, of_call));
    });
  });
}

template <class Handle, class Object>
Function make_handle() {
  return Function::FromPacked([](PackedArgs arguments, Any* result) {
    *result = Handle(tvm::ffi::make_object<Object>(arguments));
  });
}

Routing routing_in(const Tensor& memory, int64_t tokens, int64_t topk, int64_t experts,
                   int64_t rows) {
  return Routing(tvm::ffi::make_object<RoutingObj>(memory, tokens, topk, experts, rows));
}

// How many bytes the passes of a layer need, by the names of `kScratches`.
Shape scratch_sizes(const Routing& routing, int64_t hidden, int64_t inner) {
  Sizes sizes = routing->sizes();
  sizes.learn('H', hidden, "hidden");
  sizes.learn('I', inner, "inner");
  std::array<int64_t, kScratches.size()> bytes;
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = kScratches[i].bytes(sizes);
  return Shape(bytes.begin(), bytes.end());
}

Map<String, int64_t> numbers() {
  return {{"row_alignment", kRowAlignment},
          {"scale_block", kScaleBlock},
          {"gate_up_block", kGateUpBlock},
          {"dprob_columns", kDprobColumns}};
}

}  // namespace
}  // namespace sonicmoe

TVM_FFI_DLL_EXPORT_TYPED_FUNC(argument_names, sonicmoe::argument_names);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(make_pass, sonicmoe::make_pass);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(weights,
                              (sonicmoe::make_handle<sonicmoe::Weights, sonicmoe::WeightsObj>));
TVM_FFI_DLL_EXPORT_TYPED_FUNC(routing,
                              (sonicmoe::make_handle<sonicmoe::Routing, sonicmoe::RoutingObj>));
TVM_FFI_DLL_EXPORT_TYPED_FUNC(routing_in, sonicmoe::routing_in);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(scratch_sizes, sonicmoe::scratch_sizes);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(numbers, sonicmoe::numbers);
