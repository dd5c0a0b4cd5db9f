// npusim aclnn: the few aclnn kernels that torch_npu's C++ calls directly instead of through the dispatcher.
// (Everything that goes through the dispatcher is handled in simops.cpp.)
#include "runtime.h"
#include <vector>
#include <cstring>
using namespace sim;
#define API SIM_API
struct aclTensor { std::vector<int64_t> dims, strides, sdims; int64_t offset; int dtype; char* data; };
struct aclScalar { char v[16]; int dtype; };
struct aclIntArray { std::vector<int64_t> v; };
struct aclOpExecutor { std::function<void()> f; };
static size_t esz(int t) { switch (t) { case 0: case 3: case 8: return 4; case 1: case 6: case 7: case 27: return 2; case 9: case 10: case 11: case 16: return 8; case 17: return 16; default: return 1; } }
API aclTensor* aclCreateTensor(const int64_t* d, uint64_t n, int dt, const int64_t* s, int64_t off, int, const int64_t* sd, uint64_t sn, void* p) {
  auto t = new aclTensor{{d, d + n}, {}, {}, off, dt, (char*)p}; if (s) t->strides.assign(s, s + n); if (sd) t->sdims.assign(sd, sd + sn); return t; }
API aclScalar* aclCreateScalar(void* v, int dt) { auto s = new aclScalar; s->dtype = dt; memcpy(s->v, v, esz(dt)); return s; }
API aclIntArray* aclCreateIntArray(const int64_t* v, uint64_t n) { return new aclIntArray{{v, v + n}}; }
API aclIntArray* aclCreateBoolArray(const bool* v, uint64_t n) { return new aclIntArray{{v, v + n}}; }
API aclIntArray* aclCreateFloatArray(const float* v, uint64_t n) { return new aclIntArray{{v, v + n}}; }
API std::vector<aclTensor*>* aclCreateTensorList(aclTensor* const* v, uint64_t n) { return new std::vector<aclTensor*>(v, v + n); }
API int aclDestroyTensor(aclTensor* t) { delete t; return 0; }
API int aclDestroyScalar(aclScalar* t) { delete t; return 0; }
API int aclDestroyIntArray(aclIntArray* t) { delete t; return 0; }
API int aclDestroyBoolArray(aclIntArray* t) { delete t; return 0; }
API int aclDestroyFloatArray(aclIntArray* t) { delete t; return 0; }
API int aclDestroyTensorList(std::vector<aclTensor*>* t) { for (auto x : *t) delete x; delete t; return 0; }
static int run(void*, uint64_t, aclOpExecutor* e, void* st) { auto f = std::move(e->f); delete e; stream_of(st).run_in_order(f); return 0; }
#define KERNEL(name) API int name(void* w, uint64_t n, aclOpExecutor* e, void* st) { return run(w, n, e, st); }

static double to_d(const aclScalar* s) { switch (s->dtype) { case 0: { float f; memcpy(&f, s->v, 4); return f; } case 11: { double f; memcpy(&f, s->v, 8); return f; } case 9: { int64_t f; memcpy(&f, s->v, 8); return f; } case 3: { int32_t f; memcpy(&f, s->v, 4); return f; } case 12: return s->v[0]; default: return 0; } }
static void put(char* o, int dt, double x) {
  switch (dt) { case 0: { float v = x; memcpy(o, &v, 4); break; } case 11: memcpy(o, &x, 8); break; case 9: { int64_t v = x; memcpy(o, &v, 8); break; } case 3: { int32_t v = x; memcpy(o, &v, 4); break; }
    case 1: { _Float16 v = x; memcpy(o, &v, 2); break; } case 27: { float v = x; memcpy(o, (char*)&v + 2, 2); break; } default: memset(o, 0, esz(dt)); o[0] = (char)x; } }
// out is contiguous; self may be strided
API int aclnnConstantPadNdGetWorkspaceSize(const aclTensor* self, const aclIntArray* pad, const aclScalar* value, aclTensor* out, uint64_t* ws, aclOpExecutor** ex) {
  *ws = 0; aclTensor s = *self, o = *out; auto p = pad->v; double val = to_d(value);
  *ex = new aclOpExecutor{[s, o, p, val] {
    size_t e = esz(o.dtype), nd = s.dims.size(), n = 1; for (auto d : o.dims) n *= d; char* ob = o.data + o.offset * e;
    for (size_t i = 0; i < n; i++) {
      size_t r = i; int64_t off = s.offset; bool in = true;
      for (int k = (int)nd - 1; k >= 0; k--) { int64_t c = r % o.dims[k]; r /= o.dims[k]; size_t q = 2 * (nd - 1 - k); if (q < p.size()) c -= p[q]; if (c < 0 || c >= s.dims[k]) { in = false; break; } off += c * s.strides[k]; }
      if (in) memcpy(ob + i * e, s.data + off * e, e); else put(ob + i * e, o.dtype, val);
    } }};
  return 0;
}
KERNEL(aclnnConstantPadNd)
