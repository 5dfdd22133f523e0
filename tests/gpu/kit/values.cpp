// Operators of a CUDA device in host memory, for a torch that was built without CUDA.
//
// Tensors say cuda:0 and their memory is the host's. Every operator runs on CPU tensors over the same
// memory, so views, writes in place and values are real. As on a GPU, tensors of the host are refused
// beside tensors of the device, but for scalars. To be loaded after guard.cpp's library and torch.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/set_native.h>
#include <c10/core/CPUAllocator.h>
#include <torch/library.h>

namespace {

using at::Tensor;

// Memory of the host that says it is the device's.
struct HostMemory final : public c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    c10::DataPtr made = c10::GetCPUAllocator()->allocate(bytes);
    made.unsafe_set_device(device());
    return made;
  }
  c10::DeleterFnPtr raw_deleter() const override { return c10::GetCPUAllocator()->raw_deleter(); }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
  static c10::Device device() { return c10::Device(c10::DeviceType::CUDA, 0); }
};
HostMemory memory;

// The same elements as a tensor of another device; its owner stays alive with it.
Tensor on(c10::DeviceType type, const Tensor& x) {
  if (!x.defined() || x.device().type() == type) return x;
  const auto& storage = x.storage();
  const c10::Device device = type == c10::kCPU ? c10::Device(c10::kCPU) : HostMemory::device();
  c10::DataPtr alias(
      storage.mutable_data(), new c10::Storage(storage),
      [](void* owner) { delete static_cast<c10::Storage*>(owner); }, device);
  c10::Storage shared(
      c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(alias),
      type == c10::kCPU ? c10::GetCPUAllocator() : &memory, true);
  auto keys = type == c10::kCPU ? c10::DispatchKeySet(c10::DispatchKey::CPU)
                                : c10::DispatchKeySet(c10::DispatchKey::CUDA);
  Tensor made = at::detail::make_tensor<c10::TensorImpl>(std::move(shared), keys, x.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(x.sizes(), x.strides(), x.storage_offset());
  return made;
}

c10::IValue convert(const c10::IValue& value, c10::DeviceType type, bool inputs) {
  if (value.isTensor()) return on(type, value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& x : value.toTensorVector()) list.push_back(on(type, x));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const std::optional<Tensor>& x : value.toOptionalTensorVector())
      list.push_back(x ? std::optional<Tensor>(on(type, *x)) : std::nullopt);
    return list;
  }
  if (inputs && value.isDevice()) return c10::Device(c10::kCPU);
  return value;
}

// An output that an operator has given another size, with the memory that it got.
void resized(const Tensor& mine, const Tensor& alias) {
  if (mine.sizes() == alias.sizes() && mine.strides() == alias.strides()) return;
  c10::StorageImpl* to = mine.storage().unsafeGetStorageImpl();
  c10::StorageImpl* from = alias.storage().unsafeGetStorageImpl();
  if (from->data() != to->data()) {
    const size_t bytes = from->nbytes();
    c10::DataPtr data = from->set_data_ptr(c10::DataPtr());
    data.unsafe_set_device(HostMemory::device());
    to->set_data_ptr_noswap(std::move(data));
    to->set_nbytes(bytes);
  }
  mine.unsafeGetTensorImpl()->set_sizes_and_strides(
      alias.sizes(), alias.strides(), alias.storage_offset());
}

void require_device(const c10::OperatorHandle& op, const Tensor& x) {
  TORCH_CHECK(!x.defined() || x.is_cuda() || x.dim() == 0, op.schema().name(),
              ": expected all tensors to be on the same device, but found cuda:0 and cpu");
}

// Lists of indices may be the host's: CUDA copies them.
void require_device(const c10::OperatorHandle& op, const c10::IValue& value) {
  if (value.isTensor()) require_device(op, value.toTensor());
  if (value.isTensorList())
    for (const Tensor& x : value.toTensorVector()) require_device(op, x);
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size();
  const size_t first = stack->size() - count;
  std::vector<c10::IValue> given(stack->begin() + first, stack->end());
  std::vector<std::pair<Tensor, Tensor>> written;
  for (size_t i = 0; i < count; ++i) {
    require_device(op, given[i]);
    (*stack)[first + i] = convert(given[i], c10::kCPU, true);
    const auto* alias = schema.arguments()[i].alias_info();
    if (alias != nullptr && alias->isWrite() && given[i].isTensor())
      written.emplace_back(given[i].toTensor(), (*stack)[first + i].toTensor());
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  for (const auto& [mine, alias] : written) resized(mine, alias);

  // A result that is an argument, written in place, is that argument again.
  const size_t results = schema.returns().size();
  const size_t begin = stack->size() - results;
  for (size_t r = 0; r < results; ++r) {
    c10::IValue& result = (*stack)[begin + r];
    const auto* alias = schema.returns()[r].alias_info();
    bool found = false;
    for (size_t i = 0; alias != nullptr && alias->isWrite() && i < count; ++i) {
      const auto* other = schema.arguments()[i].alias_info();
      if (other != nullptr && other->isWrite() && other->beforeSets() == alias->beforeSets()) {
        result = given[i];
        found = true;
      }
    }
    if (!found) result = convert(result, c10::kCUDA, false);
  }
}

Tensor empty(c10::SymIntArrayRef size, std::optional<c10::ScalarType> dtype,
             std::optional<c10::Layout>, std::optional<c10::Device>, std::optional<bool>,
             std::optional<c10::MemoryFormat> format) {
  const c10::DispatchKeySet keys(c10::DispatchKey::CUDA);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &memory, keys,
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                     std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                     std::optional<c10::Device>, std::optional<bool>) {
  const c10::DispatchKeySet keys(c10::DispatchKey::CUDA);
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size),
                                           C10_AS_INTARRAYREF_SLOW(stride), &memory, keys,
                                           c10::dtype_or_default(dtype));
}

Tensor& copy_(Tensor& self, const Tensor& source, bool) {
  Tensor to = on(c10::kCPU, self);
  to.copy_(on(c10::kCPU, source));
  return self;
}

// The product of 16 bits into 32 that only a GPU has: of widened factors, as its definition says.
Tensor& addmm_dtype_out(const Tensor& self, const Tensor& a, const Tensor& b, c10::ScalarType dtype,
                        const at::Scalar& beta, const at::Scalar& alpha, Tensor& out) {
  Tensor to = on(c10::kCPU, out);
  at::addmm_out(to, on(c10::kCPU, self), on(c10::kCPU, a).to(dtype), on(c10::kCPU, b).to(dtype),
                beta, alpha);
  return out;
}

c10::Scalar local_scalar_dense(const Tensor& self) { return on(c10::kCPU, self).item(); }

}  // namespace

TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("copy_", TORCH_FN(copy_));
  m.impl("_local_scalar_dense", TORCH_FN(local_scalar_dense));
  m.impl("addmm.dtype_out", TORCH_FN(addmm_dtype_out));
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
}
