// Attention in eager mode: an autograd node that launches compiled Triton kernels, and calls cuBLAS and cuDNN.
//
// A *replay* says what a kind of call needs: what to allocate, and the steps of both passes, in which tensors are
// places in buffers. Replays are made in Python (`replay`), once per kind of call.

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <list>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention_backward.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/mm.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/utils/pybind.h>

#include "cuda.h"

namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Numbers of buffers: the inputs, which come first, the output, what the forward pass keeps for the way back, what a
// pass needs for itself, the output's gradient, the inputs' gradients; and from then on one tensor's memory each.
constexpr size_t INPUTS = 5, OUT = 5, KEPT = 6, SCRATCH = 7, GRAD = 8, RESULTS = 9;
using Inputs = std::array<std::optional<Tensor>, INPUTS>;

struct Launch {
  uint64_t function;
  std::array<unsigned, 3> grid;
  unsigned threads, shared;
  bool early;                                                // may get ready while the launch before it still runs
  std::vector<uint64_t> cells;                               // one parameter each, its bytes first
  std::vector<std::tuple<size_t, size_t, int64_t>> pointers;  // cell, buffer, and bytes from its beginning
};

struct View {
  size_t buffer;
  std::vector<int64_t> sizes, strides;
  int64_t offset;  // elements
};

struct Product {  // out = a b, add + a b, or out + a b
  View out, a, b;
  std::optional<View> add;
  bool more;
};

struct Gather {  // rows of x in another order
  View out, x;
  Tensor order;
};

struct Make {
  size_t buffer;
  int64_t elements;
  at::ScalarType dtype;
};

struct Drop {
  size_t buffer;
};

struct Lie {  // how a tensor lies in memory
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype;
  bool aligned;  // kernels count on 16 bytes

  bool holds(const Tensor& x) const {
    for (size_t i = 0; i < sizes.size(); ++i) {
      if (sizes[i] > 1 && x.stride(i) != strides[i]) return false;
    }
    return x.scalar_type() == dtype && (!aligned || reinterpret_cast<uint64_t>(x.data_ptr()) % 16 == 0);
  }
};

struct Fused {  // cuDNN's attention: of q, k and v; or, on the way back, of grad, q, k, v, out and lse
  std::vector<View> views;
  std::vector<std::pair<size_t, Lie>> results;
};

using Step = std::variant<Launch, Product, Gather, Make, Drop, Fused>;

// Numbers of the replays that are gone, and with them every launch that was to read what Python keeps for them.
struct Gone {
  std::mutex mutex;
  std::vector<int64_t> numbers;
};

auto& gone = *new Gone;  // never destroyed: replays may go last of all

struct Replay : torch::CustomClassHolder {
  ~Replay() override {
    const std::lock_guard<std::mutex> lock(gone.mutex);
    gone.numbers.push_back(number);
  }

  int64_t number = 0;
  mutable std::atomic<bool> captured{false};  // a CUDA graph holds its launches: it is kept for good
  std::vector<Step> forward, backward;
  std::vector<std::optional<Lie>> lies;  // of what the backward pass reads
  Lie out;
  int64_t buffers, kept, scratch, back_scratch;  // their number, and elements, of the output's type
  std::vector<size_t> apart;                     // other buffers that the forward pass keeps
  std::array<std::optional<View>, INPUTS> gradients;
};

class Driver {
 public:
  static const Driver& get() {
    static const Driver driver;
    return driver;
  }

  void enter(int device) const {
    CUcontext context = nullptr;
    check(current_(&context));
    if (context == nullptr) {  // a thread of autograd's that has not called CUDA yet
      CUdevice found = 0;
      check(device_(&found, device));
      check(retain_(&context, found));
      check(set_(context));
    }
  }

  CUstream stream(int device) const {
    void* stream = nullptr;
    TORCH_CHECK(stream_(device, &stream) == 0, "torch has no current stream on CUDA device ", device);
    return static_cast<CUstream>(stream);
  }

  void launch(const CUlaunchConfig& config, uint64_t function, void** parameters) const {
    check(launch_(&config, reinterpret_cast<CUfunction>(function), parameters, nullptr));
  }

  bool captures(CUstream stream) const {
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    check(captures_(stream, &status));
    return status != CU_STREAM_CAPTURE_STATUS_NONE;
  }

  bool knows_streams() const { return stream_ != nullptr; }

 private:
  Driver() {
    void* cuda = dlopen("libcuda.so.1", RTLD_LAZY);
    TORCH_CHECK(cuda != nullptr, "libcuda.so.1 is not there: ", dlerror());
    find(cuda, "cuLaunchKernelEx", launch_);
    find(cuda, "cuCtxGetCurrent", current_);
    find(cuda, "cuCtxSetCurrent", set_);
    find(cuda, "cuDeviceGet", device_);
    find(cuda, "cuDevicePrimaryCtxRetain", retain_);
    find(cuda, "cuStreamIsCapturing", captures_);
    find(cuda, "cuGetErrorString", say_);
    void* torch = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    const char* name = "aoti_torch_get_current_cuda_stream";
    stream_ = reinterpret_cast<decltype(stream_)>(dlsym(torch == nullptr ? RTLD_DEFAULT : torch, name));
  }

  template <typename F>
  static void find(void* library, const char* name, F& function) {
    function = reinterpret_cast<F>(dlsym(library, name));
    TORCH_CHECK(function != nullptr, "libcuda.so.1 has no ", name);
  }

  void check(CUresult code) const {
    if (code == CUDA_SUCCESS) return;
    const char* said = nullptr;
    say_(code, &said);
    TORCH_CHECK(false, "CUDA: ", said == nullptr ? "unknown error" : said, " (", static_cast<int>(code), ")");
  }

  CUresult (*launch_)(const CUlaunchConfig*, CUfunction, void**, void**);
  CUresult (*current_)(CUcontext*);
  CUresult (*set_)(CUcontext);
  CUresult (*device_)(CUdevice*, int);
  CUresult (*retain_)(CUcontext*, CUdevice);
  CUresult (*captures_)(CUstream, CUstreamCaptureStatus*);
  CUresult (*say_)(CUresult, const char**);
  int32_t (*stream_)(int32_t, void**) = nullptr;  // torch's, of its stable C interface
};

// One pass: its device and stream, and its buffers.
class Pass {
 public:
  Pass(const Replay& replay, const Tensor& like)
      : replay_(replay),
        guard_(like.device()),
        options_(like.options()),
        buffers_(replay.buffers),
        at_(replay.buffers) {
    if (like.is_cuda()) {
      Driver::get().enter(like.device().index());
      stream_ = Driver::get().stream(like.device().index());
    }
    const bool on_default_stream = like.is_cuda() && stream_ == nullptr;  // which no graph captures
    if (!on_default_stream && Driver::get().captures(stream_)) replay.captured = true;
  }

  void put(size_t buffer, const Tensor& x) {
    buffers_[buffer] = x;
    at_[buffer] = x.defined() ? reinterpret_cast<uint64_t>(x.data_ptr()) : 0;
  }

  // The tensor, or a copy that lies as the kernels were told.
  void fit(size_t buffer, const Tensor& x, const std::optional<Lie>& lie) {
    if (!lie || !x.defined() || lie->holds(x)) return put(buffer, x);
    auto sizes = lie->sizes;
    for (size_t i = 0; i < sizes.size(); ++i) {
      if (lie->strides[i] == 0) sizes[i] = 1;  // one for all, as in a tensor that is expanded
    }
    const auto own = at::empty_strided(sizes, lie->strides, options_.dtype(lie->dtype));
    put(buffer, own.copy_(x.as_strided(sizes, x.strides())));
  }

  void fit(size_t buffer, const Tensor& x) { fit(buffer, x, replay_.lies[buffer]); }

  void make(size_t buffer, int64_t elements) {
    if (elements > 0) take(Make{buffer, elements, replay_.out.dtype});
  }

  const Tensor& at(size_t buffer) const { return buffers_[buffer]; }

  Tensor view(const View& v) const {
    const Tensor& x = buffers_[v.buffer];
    return x.as_strided(v.sizes, v.strides, x.storage_offset() + v.offset);
  }

  void run(const std::vector<Step>& steps) {
    for (const auto& step : steps) std::visit([this](const auto& s) { take(s); }, step);
  }

  static constexpr size_t MOST = 64;

 private:
  void take(const Launch& launch) {
    std::array<uint64_t, MOST> cells;
    std::array<void*, MOST> parameters;
    std::memcpy(cells.data(), launch.cells.data(), launch.cells.size() * sizeof(uint64_t));
    for (const auto& [cell, buffer, offset] : launch.pointers) cells[cell] = at_[buffer] + offset;
    for (size_t i = 0; i < launch.cells.size(); ++i) parameters[i] = &cells[i];
    CUlaunchAttribute early = {};
    early.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    early.value.programmaticStreamSerializationAllowed = 1;
    CUlaunchConfig config = {};
    config.gridDimX = launch.grid[0];
    config.gridDimY = launch.grid[1];
    config.gridDimZ = launch.grid[2];
    config.blockDimX = launch.threads;
    config.blockDimY = config.blockDimZ = 1;
    config.sharedMemBytes = launch.shared;
    config.hStream = stream_;
    config.attrs = &early;
    config.numAttrs = launch.early ? 1 : 0;
    Driver::get().launch(config, launch.function, parameters.data());
  }

  void take(const Product& product) {
    auto out = view(product.out);
    if (product.more) {
      out.addmm_(view(product.a), view(product.b));
    } else if (product.add) {
      at::addmm_out(out, view(*product.add), view(product.a), view(product.b));
    } else {
      at::mm_out(out, view(product.a), view(product.b));
    }
  }

  void take(const Gather& gather) {
    auto out = view(gather.out);
    at::index_select_out(out, view(gather.x), 0, gather.order);
  }

  void take(const Make& make) {
    const Lie& out = replay_.out;
    const auto options = options_.dtype(make.dtype);
    put(make.buffer, make.buffer == OUT ? at::empty_strided(out.sizes, out.strides, options)
                                        : at::empty({make.elements}, options));
  }

  void take(const Drop& drop) { put(drop.buffer, {}); }

  void take(const Fused& fused) {
    std::vector<Tensor> x, results;
    for (const auto& v : fused.views) x.push_back(view(v));
    if (x.size() == 3) {
      const auto found = at::_scaled_dot_product_cudnn_attention(x[0], x[1], x[2], {}, true);
      results = {std::get<0>(found), std::get<1>(found)};
    } else {
      const auto seed = at::empty({1}, options_.dtype(at::kLong));  // of no dropout
      const auto [dq, dk, dv] = at::_scaled_dot_product_cudnn_attention_backward(
          x[0], x[1], x[2], x[3], x[4], x[5], seed, seed, {}, {}, {}, x[1].size(2), x[2].size(2), 0.0, false);
      results = {dq, dk, dv};
    }
    for (size_t i = 0; i < results.size(); ++i) fit(fused.results[i].first, results[i], fused.results[i].second);
  }

  const Replay& replay_;
  c10::DeviceGuard guard_;
  at::TensorOptions options_;
  CUstream stream_ = nullptr;
  std::vector<Tensor> buffers_;
  std::vector<uint64_t> at_;
};

// The output and what is kept, in this order: a block, and other buffers.
variable_list forward(const Replay& replay, const Inputs& inputs) {
  at::AutoDispatchBelowADInplaceOrView below;
  Pass pass(replay, *inputs[0]);
  for (size_t i = 0; i < INPUTS; ++i) pass.put(i, inputs[i].value_or(Tensor()));
  pass.make(KEPT, replay.kept);
  pass.make(SCRATCH, replay.scratch);
  pass.run(replay.forward);
  variable_list found = {pass.at(OUT), pass.at(KEPT)};
  for (const size_t buffer : replay.apart) found.push_back(pass.at(buffer));
  return found;
}

std::array<Tensor, INPUTS> backward(const Replay& replay, const Tensor& grad, const variable_list& saved) {
  at::AutoDispatchBelowADInplaceOrView below;
  Pass pass(replay, grad);
  for (size_t i = 0; i <= OUT; ++i) pass.fit(i, saved[i]);  // hooks on what was saved may have moved it
  pass.put(KEPT, saved[KEPT]);
  for (size_t i = 0; i < replay.apart.size(); ++i) pass.fit(replay.apart[i], saved[KEPT + 1 + i]);
  pass.fit(GRAD, grad.resolve_neg());
  pass.make(SCRATCH, replay.back_scratch);
  pass.run(replay.backward);
  std::array<Tensor, INPUTS> found;
  for (size_t i = 0; i < INPUTS; ++i) {
    if (replay.gradients[i]) found[i] = pass.view(*replay.gradients[i]);
  }
  return found;
}

struct Attention : torch::autograd::Function<Attention> {
  static Tensor forward(AutogradContext* ctx, const std::optional<Tensor>& a, const std::optional<Tensor>& b,
                        const std::optional<Tensor>& c, const std::optional<Tensor>& d, const std::optional<Tensor>& e,
                        const c10::intrusive_ptr<Replay>& replay) {
    const Inputs inputs = {a, b, c, d, e};
    auto found = ::forward(*replay, inputs);
    ctx->set_materialize_grads(false);
    ctx->saved_data["replay"] = c10::IValue::make_capsule(replay);
    variable_list saved(OUT + 1);
    for (size_t i = 0; i < INPUTS; ++i) {
      if (replay->lies[i]) saved[i] = inputs[i].value_or(Tensor());
    }
    if (replay->lies[OUT]) saved[OUT] = found[0];
    saved.insert(saved.end(), found.begin() + 1, found.end());
    ctx->save_for_backward(std::move(saved));
    return found[0];
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    variable_list results(INPUTS + 1);
    if (!grads[0].defined()) return results;
    const auto replay = c10::static_intrusive_pointer_cast<Replay>(ctx->saved_data["replay"].toCapsule());
    TORCH_CHECK(!at::GradMode::is_enabled(), "a fused kernel can be differentiated only once, and create_graph=True asks for ",
                "more; attention with impl=\"reference\" can be differentiated again");
    auto found = ::backward(*replay, grads[0], ctx->get_saved_variables());
    for (size_t i = 0; i < INPUTS; ++i) results[i] = found[i];
    return results;
  }
};

// What tells kinds of calls apart.
using Key = std::vector<int64_t>;

struct Hash {
  size_t operator()(const Key& key) const {
    uint64_t hash = key.size();
    for (const int64_t x : key) hash = (hash ^ static_cast<uint64_t>(x)) * 0x9E3779B97F4A7C15, hash ^= hash >> 29;
    return hash;
  }
};

// Null: refused. And their keys in the order in which they were learnt. Under the interpreter's lock, and never
// destroyed, since replays hold tensors. Nodes own their replays, too.
auto& replays = *new std::unordered_map<Key, c10::intrusive_ptr<Replay>, Hash>;
auto& order = *new std::list<Key>;

// Where `most` are known that no graph holds, forget all but the newer half of these.
void forget(size_t most) {
  const auto held = [](const Key& key) {
    const auto& replay = replays.at(key);
    return replay && replay->captured;
  };
  const auto others = order.size() - std::count_if(order.begin(), order.end(), held);
  if (others < most) return;
  auto left = others - most / 2;
  for (auto key = order.begin(); key != order.end() && left > 0;) {
    if (held(*key)) {
      ++key;
      continue;
    }
    replays.erase(*key);
    key = order.erase(key);
    --left;
  }
}

bool plain(const std::optional<Tensor>& x, const at::Device& device) {
  if (!x) return true;
  const auto last = x->dim() - 1;
  return x->layout() == at::kStrided && x->device() == device && x->numel() > 0 &&
         (last < 0 || x->stride(last) == 1 || x->size(last) == 1) && !x->is_neg() &&
         !x->key_set().has(c10::DispatchKey::Python) && !torch::autograd::isFwGradDefined(x);
}

Key key_of(const Key& kind, const std::vector<double>& numbers, const Inputs& inputs) {
  Key key;
  key.reserve(64 + kind.size());
  const bool grad = at::GradMode::is_enabled();
  for (const auto& x : inputs) {
    key.push_back(x ? x->dim() : -1);
    if (!x) continue;
    key.insert(key.end(), x->sizes().begin(), x->sizes().end());
    key.insert(key.end(), x->strides().begin(), x->strides().end());
    const bool aligned = reinterpret_cast<uint64_t>(x->data_ptr()) % 16 == 0;
    key.push_back(static_cast<int64_t>(x->scalar_type()) << 2 | (grad && x->requires_grad()) << 1 | aligned);
  }
  key.push_back(inputs[0]->device().index());
  key.push_back(at::globalContext().deterministicAlgorithms());
  for (const double number : numbers) {
    std::memcpy(&key.emplace_back(), &number, sizeof number);
  }
  key.insert(key.end(), kind.begin(), kind.end());
  return key;
}

// The output; None where this kind of call is not known, False where it is refused.
py::object attend(const Key& kind, const std::vector<double>& numbers, const Inputs& inputs) {
  const auto is_plain = [&](const auto& x) { return plain(x, inputs[0]->device()); };
  if (!inputs[0] || !std::all_of(inputs.begin(), inputs.end(), is_plain)) return py::bool_(false);
  const auto found = replays.find(key_of(kind, numbers, inputs));
  if (found == replays.end()) return py::none();
  const auto replay = found->second;  // owned while it runs
  if (!replay) return py::bool_(false);
  Tensor out;
  {
    py::gil_scoped_release release;
    if (replay->backward.empty()) {
      out = forward(*replay, inputs)[0];
    } else {
      out = Attention::apply(inputs[0], inputs[1], inputs[2], inputs[3], inputs[4], replay);
    }
  }
  return py::cast(out);
}

using ViewParts = std::tuple<size_t, std::vector<int64_t>, std::vector<int64_t>, int64_t>;
using LieParts = std::tuple<std::vector<int64_t>, std::vector<int64_t>, at::ScalarType, bool>;
using LaunchParts = std::tuple<uint64_t, std::array<unsigned, 3>, unsigned, unsigned, bool, std::vector<uint64_t>,
                               std::vector<std::tuple<size_t, size_t, int64_t>>>;
using ProductParts = std::tuple<ViewParts, ViewParts, ViewParts, std::optional<ViewParts>>;
using GatherParts = std::tuple<ViewParts, ViewParts, Tensor>;
using MakeParts = std::tuple<size_t, int64_t, at::ScalarType>;
using FusedParts = std::pair<std::vector<ViewParts>, std::vector<std::pair<size_t, LieParts>>>;
using StepParts = std::variant<LaunchParts, ProductParts, GatherParts, MakeParts, std::tuple<size_t>, FusedParts>;

template <typename T, typename Parts>
T from(const Parts& parts) {
  return std::apply([](const auto&... x) { return T{x...}; }, parts);
}

std::optional<View> view_of(const std::optional<ViewParts>& parts) {
  return parts ? std::optional(from<View>(*parts)) : std::nullopt;
}

std::vector<Step> steps_of(const std::vector<StepParts>& all) {
  std::vector<Step> steps;
  for (const auto& parts : all) {
    if (const auto* launch = std::get_if<LaunchParts>(&parts)) {
      TORCH_CHECK(std::get<5>(*launch).size() <= Pass::MOST, "a kernel has too many parameters");
      steps.emplace_back(from<Launch>(*launch));
    } else if (const auto* product = std::get_if<ProductParts>(&parts)) {
      const auto& [out, a, b, add] = *product;
      steps.emplace_back(Product{from<View>(out), from<View>(a), from<View>(b), view_of(add), add == out});
    } else if (const auto* gather = std::get_if<GatherParts>(&parts)) {
      const auto& [out, x, order] = *gather;
      steps.emplace_back(Gather{from<View>(out), from<View>(x), order});
    } else if (const auto* make = std::get_if<MakeParts>(&parts)) {
      steps.emplace_back(from<Make>(*make));
    } else if (const auto* drop = std::get_if<std::tuple<size_t>>(&parts)) {
      steps.emplace_back(from<Drop>(*drop));
    } else {
      Fused fused;
      for (const auto& view : std::get<FusedParts>(parts).first) fused.views.push_back(from<View>(view));
      for (const auto& [buffer, lie] : std::get<FusedParts>(parts).second) {
        fused.results.emplace_back(buffer, from<Lie>(lie));
      }
      steps.emplace_back(std::move(fused));
    }
  }
  return steps;
}

void fill(Replay& replay, const std::vector<StepParts>& forward, const std::vector<StepParts>& backward,
          const std::unordered_map<size_t, LieParts>& lies, const std::optional<LieParts>& out,
          const std::array<int64_t, 4>& sizes, const std::vector<size_t>& apart,
          const std::array<std::optional<ViewParts>, INPUTS>& gradients) {
  replay.forward = steps_of(forward);
  replay.backward = steps_of(backward);
  replay.lies.resize(sizes[0]);
  for (const auto& [buffer, parts] : lies) replay.lies.at(buffer) = from<Lie>(parts);
  replay.out = from<Lie>(out.value());
  replay.apart = apart;
  replay.buffers = sizes[0], replay.kept = sizes[1], replay.scratch = sizes[2], replay.back_scratch = sizes[3];
  for (size_t i = 0; i < INPUTS; ++i) replay.gradients[i] = view_of(gradients[i]);
}

// Remember what a kind of call needs, or, where no steps are given, that it is refused; no more than `most` kinds, but
// for those that a graph holds. The replay's number; none where there is none.
std::optional<int64_t> learn(const Key& kind, const std::vector<double>& numbers, const Inputs& inputs,
                             const std::vector<StepParts>& forward, const std::vector<StepParts>& backward,
                             const std::unordered_map<size_t, LieParts>& lies, const std::optional<LieParts>& out,
                             const std::array<int64_t, 4>& sizes, const std::vector<size_t>& apart,
                             const std::array<std::optional<ViewParts>, INPUTS>& gradients, size_t most) {
  static int64_t number = 0;
  const auto key = key_of(kind, numbers, inputs);
  if (replays.count(key)) return std::nullopt;
  auto replay = forward.empty() ? c10::intrusive_ptr<Replay>() : c10::make_intrusive<Replay>();
  if (replay) fill(*replay, forward, backward, lies, out, sizes, apart, gradients), replay->number = ++number;
  forget(most);
  order.push_back(key);
  replays.emplace(key, replay);
  return replay ? std::optional(replay->number) : std::nullopt;
}

// Numbers of replays that went since this was last asked.
std::vector<int64_t> numbers_of_gone() {
  const std::lock_guard<std::mutex> lock(gone.mutex);
  return std::exchange(gone.numbers, {});
}

// Why nothing can be launched here; None when it can.
std::optional<std::string> missing() {
  try {
    if (Driver::get().knows_streams()) return std::nullopt;
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "this torch is without CUDA, or does not say what its current stream is";
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("attend", torch::wrap_pybind_function(attend));
  m.def("learn", torch::wrap_pybind_function(learn));
  m.def("gone", torch::wrap_pybind_function(numbers_of_gone));
  m.def("missing", torch::wrap_pybind_function(missing));
}
