// Attention over tokens in eager mode: an autograd node that launches the compiled Triton kernels by itself.
//
// A *recipe* says what a kind of call needs: what to allocate, and for every kernel its handle, grid and packed
// parameters, in which tensors are slots to fill. Recipes are made in Python (`ragged_recipe`), once per kind of call.

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
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

// What a pointer among a kernel's parameters may be.
constexpr std::array SLOTS = {"q", "k", "v", "beta", "seed", "out", "lse", "keys", "values", "sums", "shifted", "grad",
                              "dq", "dk", "dv", "of_queries", "delta", "scratch"};
enum Slot { Q, K, V, BETA, SEED, OUT, LSE, KEYS, VALUES, SUMS, SHIFTED, GRAD, DQ, DK, DV, OF_QUERIES, DELTA, SCRATCH };
static_assert(SLOTS.size() == SCRATCH + 1);

constexpr std::array KERNELS = {"sum_rows", "pool", "forward", "delta", "backward", "settle", "sum_rows again",
                                "place"};
enum Kernel { SUM_ROWS, POOL, FORWARD, DELTA_OF, BACKWARD, SETTLE, SUM_ROWS_AGAIN, PLACE };
static_assert(KERNELS.size() == PLACE + 1);

struct Launch {
  uint64_t function;
  std::array<unsigned, 3> grid;
  unsigned threads, shared;
  bool early;                                 // may get ready while the launch before it still runs
  std::vector<uint64_t> cells;                // one parameter each, its bytes first
  std::vector<std::pair<int, int>> pointers;  // cell and slot
};

struct Buffer {
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

struct Block {  // several buffers in one allocation
  int64_t bytes;
  std::vector<std::pair<int, int64_t>> places;  // slot and offset
};

struct Recipe {
  std::array<std::optional<Launch>, KERNELS.size()> launches;
  std::array<std::optional<Buffer>, SLOTS.size()> buffers;
  Block kept, scratch;  // of the forward pass, for the way back; of the backward pass alone
  bool together;  // the gradients of q, k and v are thirds of one buffer
  double factor;  // from sums over keys to their mean

  // What the backward kernel reads of the inputs is kept for it.
  Tensor saved(Slot slot, const Tensor& x) const {
    const auto& pointers = launches[BACKWARD]->pointers;
    const bool read = std::any_of(pointers.begin(), pointers.end(), [=](const auto& p) { return p.second == slot; });
    return read ? x : Tensor();
  }
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
  CUresult (*say_)(CUresult, const char**);
  int32_t (*stream_)(int32_t, void**) = nullptr;  // torch's, of its stable C interface
};

// One pass: its device and stream, and where everything lies.
class Pass {
 public:
  Pass(const Recipe& recipe, const Tensor& like) : recipe_(recipe), guard_(like.device()), options_(like.options()) {
    if (like.is_cuda()) {
      Driver::get().enter(like.device().index());
      stream_ = Driver::get().stream(like.device().index());
    }
  }

  const Tensor& put(Slot slot, const Tensor& x) {
    at_[slot] = x.defined() ? reinterpret_cast<uint64_t>(x.data_ptr()) : 0;
    return x;
  }

  Tensor make(Slot slot) {
    const Buffer& buffer = recipe_.buffers[slot].value();
    return put(slot, at::empty_strided(buffer.sizes, buffer.strides, options_.dtype(buffer.dtype)));
  }

  // Room for the gradients of q, k and v: thirds of [batch, length, 3, heads, dim], or apart.
  std::array<Tensor, 3> make_gradients() {
    if (!recipe_.together) return {make(DQ), make(DK), make(DV)};
    const Buffer& buffer = recipe_.buffers[DQ].value();
    const auto& size = buffer.sizes;
    const auto whole = at::empty({size[0], size[2], 3, size[1], size[3]}, options_.dtype(buffer.dtype));
    const auto parts = whole.permute({2, 0, 3, 1, 4});
    return {put(DQ, parts.select(0, 0)), put(DK, parts.select(0, 1)), put(DV, parts.select(0, 2))};
  }

  // The tensor, or a copy that lies as the kernels were told.
  Tensor fit(Slot slot, const Tensor& x) {
    if (!x.defined() || recipe_.buffers[slot]->holds(x)) return put(slot, x);
    return make(slot).copy_(x);
  }

  Tensor make(const Block& block) {
    auto x = at::empty({block.bytes}, options_.dtype(at::kByte));
    place(block, x);
    return x;
  }

  void place(const Block& block, const Tensor& x) {
    const auto start = reinterpret_cast<uint64_t>(x.data_ptr());
    for (const auto& [slot, offset] : block.places) at_[slot] = start + offset;
  }

  void launch(Kernel kernel) {
    if (!recipe_.launches[kernel]) return;
    const Launch& launch = *recipe_.launches[kernel];
    std::array<uint64_t, MOST> cells;
    std::array<void*, MOST> parameters;
    std::memcpy(cells.data(), launch.cells.data(), launch.cells.size() * sizeof(uint64_t));
    for (const auto& [cell, slot] : launch.pointers) cells[cell] = at_[slot];
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

  static constexpr size_t MOST = 64;

 private:
  const Recipe& recipe_;
  c10::DeviceGuard guard_;
  at::TensorOptions options_;
  CUstream stream_ = nullptr;
  std::array<uint64_t, SLOTS.size()> at_ = {};
};

struct Found {
  Tensor out, kept, sums;
};

Found forward(const Recipe& recipe, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& beta,
              const Tensor& seed) {
  at::AutoDispatchBelowADInplaceOrView below;
  Pass pass(recipe, q);
  Found found;
  pass.put(Q, q), pass.put(K, k), pass.put(V, v), pass.put(BETA, beta), pass.put(SEED, seed);
  found.out = pass.make(OUT);
  found.kept = pass.make(recipe.kept);
  if (beta.defined()) found.sums = pass.make(SUMS);
  for (const Kernel kernel : {SUM_ROWS, POOL, FORWARD}) pass.launch(kernel);
  return found;
}

struct Gradients {
  Tensor q, k, v, beta;
};

Gradients backward(const Recipe& recipe, const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v,
                   const Tensor& beta, const Tensor& seed, const Found& saved, bool want_beta) {
  at::AutoDispatchBelowADInplaceOrView below;
  Pass pass(recipe, saved.out);
  // hooks on what was saved may have moved it
  const std::array<Tensor, 5> held = {pass.fit(GRAD, grad.resolve_neg()), pass.fit(Q, q), pass.fit(K, k),
                                      pass.fit(V, v), pass.fit(OUT, saved.out)};
  auto [dq, dk, dv] = pass.make_gradients();
  Gradients found{dq, dk, dv, {}};
  pass.put(BETA, beta), pass.put(SEED, seed);
  pass.place(recipe.kept, saved.kept);
  auto scratch = recipe.scratch.bytes > 0 ? pass.make(recipe.scratch) : Tensor();
  auto of_queries = beta.defined() ? pass.make(OF_QUERIES) : Tensor();
  for (const Kernel kernel : {DELTA_OF, BACKWARD, SETTLE, SUM_ROWS_AGAIN, PLACE}) pass.launch(kernel);
  if (want_beta) {
    auto products = of_queries.sum(2).mul(saved.sums.sum(2));
    found.beta = products.sum(at::IntArrayRef({0, 2})).mul(-recipe.factor);
  }
  return found;
}

// Differentiated once: what comes back from it must not be differentiated again.
struct Once : torch::autograd::Function<Once> {
  static Tensor forward(AutogradContext*, const Tensor& x) { return x; }
  static variable_list backward(AutogradContext*, const variable_list&) {
    TORCH_CHECK(false, "this attention can be differentiated only once; with impl=\"reference\" it can be again");
  }
};

Tensor once(const Tensor& x) {
  return x.defined() ? Once::apply(x.detach().set_requires_grad(true)) : x;
}

struct Tokens : torch::autograd::Function<Tokens> {
  static Tensor forward(AutogradContext* ctx, const Tensor& q, const Tensor& k, const Tensor& v,
                        const std::optional<Tensor>& beta, const std::optional<Tensor>& seed, const Recipe* recipe) {
    auto found = ::forward(*recipe, q, k, v, beta.value_or(Tensor()), seed.value_or(Tensor()));
    ctx->set_materialize_grads(false);
    ctx->saved_data["recipe"] = reinterpret_cast<int64_t>(recipe);
    ctx->save_for_backward({recipe->saved(Q, q), recipe->saved(K, k), recipe->saved(V, v), beta.value_or(Tensor()),
                            seed.value_or(Tensor()), found.out, found.kept, found.sums});
    return found.out;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    variable_list results(6);
    if (!grads[0].defined()) return results;
    const auto saved = ctx->get_saved_variables();
    const auto* recipe = reinterpret_cast<const Recipe*>(ctx->saved_data["recipe"].toInt());
    const bool learned = saved[3].defined() && ctx->needs_input_grad(3);
    auto found = ::backward(*recipe, grads[0], saved[0], saved[1], saved[2], saved[3], saved[4],
                            {saved[5], saved[6], saved[7]}, learned);
    const std::array<Tensor, 4> all = {found.q, found.k, found.v, found.beta};
    for (size_t i = 0; i < all.size(); ++i) {
      if (i == 3 ? learned : ctx->needs_input_grad(i)) {
        results[i] = at::GradMode::is_enabled() ? once(all[i]) : all[i];
      }
    }
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

// Null: refused. Under the interpreter's lock, and never destroyed: nodes point to recipes, and these hold tensors.
auto& recipes = *new std::unordered_map<Key, std::unique_ptr<Recipe>, Hash>;

bool plain(const Tensor& x) {
  return x.dim() == 4 && x.layout() == at::kStrided && x.numel() > 0 && (x.stride(3) == 1 || x.size(3) == 1) &&
         !x.is_neg() && !x.key_set().has(c10::DispatchKey::Python) &&
         !torch::autograd::isFwGradDefined(x);
}

Key key_of(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& beta,
           const std::vector<int64_t>& scales, bool causal, double dropout) {
  Key key;
  key.reserve(40 + scales.size());
  for (const auto* x : {&q, &k, &v}) {
    key.insert(key.end(), x->sizes().begin(), x->sizes().end());
    key.insert(key.end(), x->strides().begin(), x->strides().end());
    key.push_back(static_cast<int64_t>(x->scalar_type()));
    key.push_back(x->device().index());
    key.push_back(reinterpret_cast<uint64_t>(x->data_ptr()) % 16 == 0);
  }
  const bool rounded = q.scalar_type() == at::kFloat && at::globalContext().allowTF32CuBLAS();
  const bool back = at::GradMode::is_enabled() && (q.requires_grad() || k.requires_grad() || v.requires_grad() ||
                                                   (beta.has_value() && beta->requires_grad()));
  const bool exact = at::globalContext().deterministicAlgorithms();
  key.push_back(beta.has_value() | causal << 1 | rounded << 2 | back << 3 | exact << 4);
  int64_t bits = 0;
  std::memcpy(&bits, &dropout, sizeof bits);
  key.push_back(bits);
  key.insert(key.end(), scales.begin(), scales.end());
  return key;
}

// The output; None where this kind of call is not known, False where it is refused.
py::object attend(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& beta,
                  const std::optional<Tensor>& seed, const std::vector<int64_t>& scales, bool causal, double dropout) {
  if (!(plain(q) && plain(k) && plain(v))) return py::bool_(false);
  const auto found = recipes.find(key_of(q, k, v, beta, scales, causal, dropout));
  if (found == recipes.end()) return py::none();
  const Recipe* recipe = found->second.get();
  if (recipe == nullptr) return py::bool_(false);
  Tensor out;
  {
    py::gil_scoped_release release;
    if (at::GradMode::is_enabled() && recipe->buffers[DQ]) {
      out = Tokens::apply(q, k, v, beta, seed, recipe);
    } else {
      out = forward(*recipe, q, k, v, beta.value_or(Tensor()), seed.value_or(Tensor())).out;
    }
  }
  return py::cast(out);
}

template <typename Names>
int index_of(const Names& names, const std::string& name) {
  for (size_t i = 0; i < names.size(); ++i) {
    if (name == names[i]) return static_cast<int>(i);
  }
  TORCH_CHECK(false, "nothing here is called ", name);
}

using LaunchParts = std::tuple<uint64_t, std::array<unsigned, 3>, unsigned, unsigned, bool, std::vector<uint64_t>,
                               std::vector<std::pair<int, std::string>>>;
using BufferParts = std::tuple<std::vector<int64_t>, std::vector<int64_t>, at::ScalarType, bool>;
using BlockParts = std::pair<int64_t, std::vector<std::pair<std::string, int64_t>>>;

Block block_of(const BlockParts& parts) {
  Block block{parts.first, {}};
  for (const auto& [name, offset] : parts.second) block.places.emplace_back(index_of(SLOTS, name), offset);
  return block;
}

// Remember what a kind of call needs, or, where no launches are given, that it is refused.
void learn(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& beta,
           const std::vector<int64_t>& scales, bool causal, double dropout,
           const std::unordered_map<std::string, LaunchParts>& launches,
           const std::unordered_map<std::string, BufferParts>& buffers, const BlockParts& kept,
           const BlockParts& scratch, bool together, double factor) {
  auto& place = recipes[key_of(q, k, v, beta, scales, causal, dropout)];
  if (launches.empty() || place != nullptr) return;
  auto recipe = std::make_unique<Recipe>();
  for (const auto& [name, parts] : launches) {
    const auto& [function, grid, threads, shared, early, cells, pointers] = parts;
    TORCH_CHECK(cells.size() <= Pass::MOST, name, " has too many parameters");
    Launch launch{function, grid, threads, shared, early, cells, {}};
    for (const auto& [cell, slot] : pointers) launch.pointers.emplace_back(cell, index_of(SLOTS, slot));
    recipe->launches[index_of(KERNELS, name)] = std::move(launch);
  }
  for (const auto& [name, parts] : buffers) {
    const auto& [sizes, strides, dtype, aligned] = parts;
    recipe->buffers[index_of(SLOTS, name)] = Buffer{sizes, strides, dtype, aligned};
  }
  recipe->kept = block_of(kept);
  recipe->scratch = block_of(scratch);
  recipe->together = together;
  recipe->factor = factor;
  place = std::move(recipe);
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
  m.def("missing", torch::wrap_pybind_function(missing));
}
