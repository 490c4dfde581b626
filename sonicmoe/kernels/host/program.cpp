// Replays a program: a list of launches that Python has written down once, in one native call.
//
// Why one call: a launch from Python costs the host several microseconds for its arguments alone,
// more than the launch itself. Below about 2048 tokens a GPU would wait for that.
//
// This file holds no kernel, no architecture and no list. `engine/program.py` says how a list is
// written, and hands over numbers: every name that occurs in a program is a slot. Slots are filled
//   once, when the program is made: constants;
//   once for many calls: what is bound, as the weights of a layer are;
//   in every call: arguments, and parts of scratch where no argument came.
// A launch names for every argument of its kernel the slots that may give it. All is chosen, checked
// and cut before the first launch.
//
// Ownership: what is bound owns references to its tensors, because it outlives the call that made
// it. Its maker keeps it beside the very tensors it was made of, so that it never holds memory that
// would be free without it. A call owns nothing: memory that its caller frees after the pass is
// really free.
//
// The caller allocates scratch because its framework then does: the memory comes from the
// framework's pool, belongs to the caller's stream, and running out of it is the framework's own
// error.
#include <tvm/ffi/container/map.h>
#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/memory.h>
#include <tvm/ffi/object.h>
#include <tvm/ffi/optional.h>

#include <algorithm>
#include <memory>
#include <numeric>

#include "../numbers.hpp"
#include "fields.hpp"

namespace sonicmoe {
namespace {

using tvm::ffi::AnyView;
using tvm::ffi::Function;
using tvm::ffi::Map;
using tvm::ffi::Optional;
using tvm::ffi::PackedArgs;
using tvm::ffi::Shape;
using tvm::ffi::String;
using tvm::ffi::Tensor;
using Numbers = Array<int64_t>;

constexpr int kMaxSlots = 96, kMaxParts = 48, kMaxOperands = 192, kMaxArguments = 64;
constexpr const char* kBound = "weights";  // what messages call it

// ---- what is bound ----

class BoundObj : public tvm::ffi::Object {
 public:
  BoundObj(std::shared_ptr<const std::vector<Field>> fields, const PackedArgs& arguments)
      : fields_(std::move(fields)), owned(fields_->size()), values(fields_->size()) {
    if (arguments.size() != static_cast<int>(owned.size()))
      TVM_FFI_THROW(TypeError) << kBound << " takes " << owned.size() << " values, got "
                               << arguments.size();
    std::vector<const DLTensor*> tensors(owned.size());
    for (size_t i = 0; i < owned.size(); ++i) {
      const Field& field = (*fields_)[i];
      if (field.is_tensor()) tensors[i] = tensor_of(arguments[i], kBound, field);
    }
    std::vector<int> all(owned.size());
    std::iota(all.begin(), all.end(), 0);
    require_fit(kBound, *fields_, all, tensors.data(), [&] {
      sizes = Sizes();
      return problem_of(*fields_, all, tensors.data(), sizes);
    });
    for (size_t i = 0; i < owned.size(); ++i) {
      if (tensors[i] != nullptr) {
        const auto tensor = arguments[i].cast<Tensor>();
        owned[i] = tensor;
        values[i] = const_cast<DLTensor*>(tensor.GetDLTensorPtr());  // whose shape lives as long
      } else if (arguments[i] != nullptr) {
        owned[i] = arguments[i];
        values[i] = owned[i];
      }
    }
  }
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("sonicmoe.Bound", BoundObj, tvm::ffi::Object);

 private:
  std::shared_ptr<const std::vector<Field>> fields_;

 public:
  std::vector<Any> owned;
  std::vector<AnyView> values;
  Sizes sizes;
};

class Bound : public tvm::ffi::ObjectRef {
 public:
  TVM_FFI_DEFINE_OBJECT_REF_METHODS_NULLABLE(Bound, ObjectRef, BoundObj);
};

// ---- scratch ----

// A matrix that is cut off a buffer, behind another part of it or at its beginning.
struct Part {
  int slot, buffer, after;  // the part before it, or -1
  int64_t alignment;        // a power of two
};

std::vector<Part> parts_of(const Array<Numbers>& told) {
  std::vector<Part> parts;
  for (const Numbers& n : told)
    parts.push_back({static_cast<int>(n[0]), static_cast<int>(n[1]), static_cast<int>(n[2]), n[3]});
  TVM_FFI_ICHECK(parts.size() <= kMaxParts);
  return parts;
}

struct Span {
  int64_t begin, end;  // bytes of the buffer
};

void lay_out(const std::vector<Part>& parts, const std::vector<Field>& slots, const Sizes& sizes,
             Span* spans) {
  for (size_t i = 0; i < parts.size(); ++i) {
    const Part& part = parts[i];
    const Field& field = slots[part.slot];
    int64_t bytes = dtype_of(field.element).bits / 8;
    for (int axis = 0; axis < field.rank; ++axis) bytes *= sizes.of(field.shape[axis]);
    const int64_t before = part.after < 0 ? 0 : spans[part.after].end;
    spans[i].begin = (before + part.alignment - 1) & -part.alignment;
    spans[i].end = spans[i].begin + bytes;
  }
}

struct Cut {
  std::array<int64_t, 3> shape, strides;
  DLTensor tensor;

  void from(const DLTensor& buffer, const Field& field, const Sizes& sizes, int64_t begin) {
    tensor = buffer;
    tensor.data = static_cast<char*>(buffer.data) + buffer.byte_offset + begin;
    tensor.byte_offset = 0;
    tensor.dtype = dtype_of(field.element);
    tensor.ndim = field.rank;
    tensor.shape = shape.data();
    tensor.strides = strides.data();
    for (int axis = field.rank - 1; axis >= 0; --axis) {
      shape[axis] = sizes.of(field.shape[axis]);
      strides[axis] = axis + 1 < field.rank ? strides[axis + 1] * shape[axis + 1] : 1;
    }
  }
};

// ---- the list ----

// What gives one argument of a kernel: the first of these slots that is filled. kIsFilled: whether
// one of them is.
enum class Taken { kRequired, kOptional, kIsFilled };
struct Operand {
  Taken taken;
  std::vector<int> slots;
};

struct Launch {
  Optional<Function> kernel;
  std::string name;
  std::vector<int> when;  // it is left out unless all these slots are filled
  std::vector<Operand> operands;
};

// Which of some arguments may come together: the sets of those that are allowed, as bits.
struct Rule {
  std::string words;
  std::vector<int> slots;
  std::vector<int64_t> allowed;
};

std::vector<int> ints(const Numbers& told) { return std::vector<int>(told.begin(), told.end()); }

// One call: what its slots hold, and what each launch takes of them.
struct Call {
  std::array<AnyView, kMaxSlots> value;
  std::array<int8_t, kMaxSlots> home;  // the part that fills a slot without a value, or -1
  std::array<const DLTensor*, kMaxSlots> tensor{};  // arguments alone, by their slots
  std::array<bool, kMaxParts> is_used{};
  std::array<Span, kMaxParts> span;
  std::array<Cut, kMaxParts> cut;
  std::array<int16_t, kMaxOperands> chosen;
  Sizes sizes;

  bool has(int slot) const { return value[slot] != nullptr || home[slot] >= 0; }
};

class Program {
 public:
  std::string name;
  bool binds;                  // whether what is bound is the first argument
  std::vector<int> bound;      // its slots
  std::vector<int> arguments;  // slots of the other arguments
  std::vector<Field> slots;
  std::vector<Part> parts;
  std::vector<Rule> rules;
  std::vector<Launch> launches;
  std::vector<std::pair<int, Any>> constants;

  // Everything but the launches.
  void prepare(const PackedArgs& all, Call& call) const {
    take(all, call);
    for (const Rule& rule : rules) keep(rule, call);
    choose(call);
    require_fit(name, slots, arguments, call.tensor.data(), [&, said = call.sizes] {
      call.sizes = said;
      return problem(call);
    });
    for (size_t i = 0; i < parts.size(); ++i) {
      if (!call.is_used[i]) continue;
      const Part& part = parts[i];
      call.cut[i].from(*call.tensor[part.buffer], slots[part.slot], call.sizes,
                       call.span[i].begin);
      call.value[part.slot] = &call.cut[i].tensor;
    }
  }

  // The launches from `first` on, so many of them.
  void launch(const Call& call, int first, int count) const {
    int next = 0;
    std::array<AnyView, kMaxArguments> given;
    for (int i = 0; i < first + count; ++i) {
      const Launch& launch = launches[i];
      const int size = static_cast<int>(launch.operands.size());
      if (i >= first && is_active(launch, call)) {
        for (int at = 0; at < size; ++at) {
          const int slot = call.chosen[next + at];
          if (launch.operands[at].taken == Taken::kIsFilled)
            given[at] = slot >= 0;
          else
            given[at] = slot < 0 ? AnyView() : call.value[slot];
        }
        Any nothing;
        launch.kernel.value().CallPacked(given.data(), size, &nothing);
      }
      next += size;
    }
  }

  bool is_active(const Launch& launch, const Call& call) const {
    return std::all_of(launch.when.begin(), launch.when.end(),
                       [&](int slot) { return call.has(slot); });
  }

 private:
  void take(const PackedArgs& all, Call& call) const {
    const int first = binds ? 1 : 0;
    if (all.size() != first + static_cast<int>(arguments.size()))
      TVM_FFI_THROW(TypeError) << name << " takes " << first + arguments.size()
                               << " arguments, got " << all.size();
    for (const auto& [slot, constant] : constants) call.value[slot] = constant;
    if (binds) {
      const auto given = all[0].cast<Bound>();
      if (!given.defined())
        TVM_FFI_THROW(ValueError) << name << ": " << kBound << " are None; needed: their handle";
      call.sizes = given->sizes;
      for (size_t i = 0; i < bound.size(); ++i) call.value[bound[i]] = given->values[i];
    }
    Sizes own;
    for (size_t i = 0; i < arguments.size(); ++i) {
      const int slot = arguments[i];
      const Field& field = slots[slot];
      call.value[slot] = all[first + static_cast<int>(i)];
      if (field.is_tensor()) {
        call.tensor[slot] = tensor_of(call.value[slot], name, field);
        if (call.tensor[slot] != nullptr)
          call.value[slot] = const_cast<DLTensor*>(call.tensor[slot]);
      } else if (field.element == Element::kSize) {
        own.learn(field.shape[0].letter, call.value[slot].cast<int64_t>(), field.name.c_str());
      }
    }
    own.join(call.sizes, kBound);
    call.sizes = own;
    call.home.fill(-1);
    for (size_t i = 0; i < parts.size(); ++i) {
      int8_t& home = call.home[parts[i].slot];
      if (home < 0 && call.value[parts[i].slot] == nullptr && call.tensor[parts[i].buffer] != nullptr)
        home = static_cast<int8_t>(i);
    }
  }

  void keep(const Rule& rule, const Call& call) const {
    int64_t given = 0;
    for (size_t i = 0; i < rule.slots.size(); ++i)
      given |= int64_t(call.value[rule.slots[i]] != nullptr) << i;
    if (std::find(rule.allowed.begin(), rule.allowed.end(), given) == rule.allowed.end())
      TVM_FFI_THROW(ValueError) << name << ": needed: " << rule.words;
  }

  // For each operand of each launch that is not left out, the slot that gives it.
  void choose(Call& call) const {
    int next = 0;
    for (const Launch& launch : launches) {
      const bool active = is_active(launch, call);
      if (active && !launch.kernel.has_value())
        TVM_FFI_THROW(InternalError) << "there is no kernel " << launch.name;
      for (const Operand& operand : launch.operands) {
        int16_t& chosen = call.chosen[next++] = -1;
        if (!active) continue;
        for (const int slot : operand.slots) {
          if (!call.has(slot)) continue;
          chosen = static_cast<int16_t>(slot);
          if (call.home[slot] >= 0) call.is_used[call.home[slot]] = true;
          break;
        }
        if (chosen < 0 && operand.taken == Taken::kRequired) lacks(operand.slots.back());
      }
    }
  }

  void lacks(int slot) const {
    const std::string& field = slots[slot].name;
    if (std::find(bound.begin(), bound.end(), slot) != bound.end())
      TVM_FFI_THROW(ValueError) << kBound << ": " << field
                                << " is None, and this pass needs it";
    for (const Part& part : parts)
      if (part.slot == slot) return lacks(part.buffer);
    TVM_FFI_THROW(ValueError) << name << ": " << field
                              << " is None; needed: " << needed(slots[slot]);
  }

  std::string problem(Call& call) const {
    std::string found = problem_of(slots, arguments, call.tensor.data(), call.sizes);
    if (!found.empty()) return found;
    lay_out(parts, slots, call.sizes, call.span.data());
    for (size_t i = 0; i < parts.size(); ++i) {
      if (!call.is_used[i]) continue;
      const DLTensor* buffer = call.tensor[parts[i].buffer];
      if (buffer == nullptr || buffer->shape[0] < call.span[i].end) return too_small(call, i);
    }
    return "";
  }

  std::string too_small(const Call& call, size_t first) const {
    const int slot = parts[first].buffer;
    int64_t bytes = 0;
    for (size_t i = first; i < parts.size(); ++i)
      if (call.is_used[i] && parts[i].buffer == slot) bytes = std::max(bytes, call.span[i].end);
    const int64_t given = call.tensor[slot] == nullptr ? 0 : call.tensor[slot]->shape[0];
    return slots[slot].name + " has " + std::to_string(given) +
           " bytes; needed: " + std::to_string(bytes) + " or more";
  }
};

// ---- what Python calls ----

// make_bound(fields): the function that binds values of these fields.
Function make_bound(const Array<Array<Any>>& told) {
  const auto fields = std::make_shared<const std::vector<Field>>(fields_of(told));
  return Function::FromPacked([fields](PackedArgs given, Any* result) {
    *result = Bound(tvm::ffi::make_object<BoundObj>(fields, given));
  });
}

// part_ends(letters, fields, parts): the function from their sizes to the end of each part.
Function part_ends(const String& letters, const Array<Array<Any>>& fields,
                   const Array<Numbers>& parts) {
  return Function::FromPacked([letters = std::string(letters), slots = fields_of(fields),
                               parts = parts_of(parts)](PackedArgs given, Any* result) {
    Sizes sizes;
    for (size_t i = 0; i < letters.size(); ++i)
      sizes.learn(letters[i], given[static_cast<int>(i)].cast<int64_t>(), "sizes");
    std::array<Span, kMaxParts> spans;
    lay_out(parts, slots, sizes, spans.data());
    std::vector<int64_t> ends;
    for (size_t i = 0; i < parts.size(); ++i) ends.push_back(spans[i].end);
    *result = Shape(ends.begin(), ends.end());
  });
}

std::shared_ptr<const Program> program_of(const Array<Any>& told) {
  auto made = std::make_shared<Program>();
  made->name = told[0].cast<String>();
  made->binds = told[1].cast<bool>();
  made->bound = ints(told[2].cast<Numbers>());
  made->arguments = ints(told[3].cast<Numbers>());
  made->slots = fields_of(told[4].cast<Array<Array<Any>>>());
  made->parts = parts_of(told[5].cast<Array<Numbers>>());
  for (const auto& rule : told[6].cast<Array<Array<Any>>>()) {
    const auto allowed = rule[2].cast<Numbers>();
    made->rules.push_back({rule[0].cast<String>(), ints(rule[1].cast<Numbers>()),
                           std::vector<int64_t>(allowed.begin(), allowed.end())});
  }
  size_t operands = 0;
  for (const auto& launch : told[7].cast<Array<Array<Any>>>()) {
    Launch own{launch[0].cast<Optional<Function>>(), launch[1].cast<String>(),
               ints(launch[2].cast<Numbers>()), {}};
    for (const Numbers& operand : launch[3].cast<Array<Numbers>>()) {
      std::vector<int> slots = ints(operand);
      const auto taken = static_cast<Taken>(slots[0]);
      slots.erase(slots.begin());
      own.operands.push_back({taken, slots});
    }
    operands += own.operands.size();
    TVM_FFI_ICHECK(own.operands.size() <= kMaxArguments);
    made->launches.push_back(own);
  }
  for (const auto& constant : told[8].cast<Array<Array<Any>>>())
    made->constants.push_back({static_cast<int>(constant[0].cast<int64_t>()), constant[1]});
  TVM_FFI_ICHECK(made->slots.size() <= kMaxSlots && operands <= kMaxOperands);
  return made;
}

// make_program(description): three functions of a program's arguments. The first launches all. The
// second launches nothing and returns for each launch whether it is active, then for each part
// where it begins in its buffer (-1: unused), and its sizes along two axes. The third is told a
// launch in front, and launches it.
Array<Function> make_program(const Array<Any>& told) {
  const auto program = program_of(told);
  const Function run = Function::FromPacked([program](PackedArgs given, Any*) {
    Call call;
    program->prepare(given, call);
    program->launch(call, 0, static_cast<int>(program->launches.size()));
  });
  const Function plan = Function::FromPacked([program](PackedArgs given, Any* result) {
    Call call;
    program->prepare(given, call);
    std::vector<int64_t> told;
    for (const Launch& launch : program->launches)
      told.push_back(program->is_active(launch, call));
    for (size_t i = 0; i < program->parts.size(); ++i) {
      const auto& shape = call.cut[i].shape;
      told.push_back(call.is_used[i] ? call.span[i].begin : -1);
      told.push_back(call.is_used[i] ? shape[0] : 0);
      told.push_back(call.is_used[i] ? shape[1] : 0);
    }
    *result = Shape(told.begin(), told.end());
  });
  const Function step = Function::FromPacked([program](PackedArgs given, Any*) {
    Call call;
    program->prepare(PackedArgs(given.data() + 1, given.size() - 1), call);
    program->launch(call, static_cast<int>(given[0].cast<int64_t>()), 1);
  });
  return {run, plan, step};
}

Map<String, int64_t> numbers() {
  return {{"row_alignment", kRowAlignment},
          {"scale_block", kScaleBlock},
          {"gate_up_block", kGateUpBlock},
          {"dprob_columns", kDprobColumns}};
}

}  // namespace
}  // namespace sonicmoe

TVM_FFI_DLL_EXPORT_TYPED_FUNC(make_bound, sonicmoe::make_bound);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(part_ends, sonicmoe::part_ends);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(make_program, sonicmoe::make_program);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(numbers, sonicmoe::numbers);
