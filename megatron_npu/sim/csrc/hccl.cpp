// megatron_npu_sim hccl: every collective is expressed as one "exchange" (a batch of sends and receives through per-pair
// mailboxes in POSIX shared memory) plus a local reduction in rank order, so results are deterministic and
// identical on all ranks.  Each message carries (kind, count, dtype, op): mismatched collectives are reported.
#include "runtime.h"
#include <atomic>
#include <chrono>
#include <memory>
#include <vector>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <climits>
#include <fcntl.h>
#include <linux/futex.h>
#include <map>
#include <string>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
using namespace sim;
#define API SIM_API
enum { OK = 0, E_PARA = 1, E_INTERNAL = 4, E_NOT_SUPPORT = 5, E_TIMEOUT = 9, E_REMOTE = 21 };
static const size_t CHUNK = 256 << 10;
static long env_long(const char* n, long d) { return (long)setting(n, (int64_t)d); }
static size_t esize(int dt) { static const int s[] = {1, 2, 4, 2, 4, 8, 8, 1, 2, 4, 8, 2, 16, 0, 1, 1, 1, 1}; return dt >= 0 && dt < 18 ? s[dt] : 0; }

struct Desc { uint32_t kind, dtype, op, pad; uint64_t bytes, seq; };
struct Box {                      // one per ordered (src,dst) pair
  std::atomic<uint64_t> wr, rd;   // chunks written / consumed
  Desc desc[2];
  char data[2][CHUNK];
};
struct Shm { std::atomic<uint32_t> attached, detached; std::atomic<uint32_t> bell[64]; };
struct Comm {
  std::string name; uint32_t n, rank; Shm* shm; Box* box; size_t bytes; std::mutex mu; uint64_t seq = 0;
  std::atomic<int> err{0};
  Box& at(uint32_t s, uint32_t d) { return box[(size_t)s * n + d]; }
};
static void futex_wait(std::atomic<uint32_t>* a, uint32_t v) { timespec t{0, 20000000}; syscall(SYS_futex, a, FUTEX_WAIT, v, &t, nullptr, 0); }
static void ring(Comm* c, uint32_t r) { c->shm->bell[r].fetch_add(1); syscall(SYS_futex, &c->shm->bell[r], FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

struct Item { bool send; uint32_t peer; char* buf; size_t bytes; Desc d; size_t off = 0; bool started = false, done = false; uint64_t last = 0; };
static const char* KIND[] = {"?", "broadcast", "allreduce", "reduce", "send/recv", "send/recv", "allgather", "reduce_scatter", "alltoallv", "alltoallvc", "alltoall", "gather", "scatter", "batch_send_recv", "", "", "allgather_v", "reduce_scatter_v"};

static int exchange(Comm* c, std::vector<Item>& it, uint32_t kind) {
  auto t0 = std::chrono::steady_clock::now(); long limit = env_long("hccl_timeout", 300);
  size_t left = it.size();
  auto step = [&](size_t i) -> bool {   // one unit of progress on item i
    Item& x = it[i];
    if (x.send) {
      Box& b = c->at(c->rank, x.peer);
      if (x.off < x.bytes || !x.started) {
        uint64_t w = b.wr.load(), r = b.rd.load(std::memory_order_acquire);
        if (w - r >= 2) return false;
        size_t k = std::min(CHUNK, x.bytes - x.off);
        b.desc[w & 1] = x.d; memcpy(b.data[w & 1], x.buf + x.off, k);
        x.off += k; x.started = true; x.last = w + 1;
        b.wr.store(w + 1, std::memory_order_release); ring(c, x.peer); return true;
      }
      if (b.rd.load(std::memory_order_acquire) >= x.last) { x.done = true; left--; return true; }   // rendezvous
      return false;
    }
    Box& b = c->at(x.peer, c->rank);
    uint64_t w = b.wr.load(std::memory_order_acquire), r = b.rd.load();
    if (w == r) return false;
    Desc& d = b.desc[r & 1];
    if (d.kind != x.d.kind || d.bytes != x.d.bytes || d.dtype != x.d.dtype || d.op != x.d.op) {
      fprintf(stderr, "[simulated NPU] HCCL mismatch on %s rank %u: expected %s of %zu bytes dtype %u op %u from rank %u, got %s of %zu bytes dtype %u op %u\n",
              c->name.c_str(), c->rank, KIND[x.d.kind], (size_t)x.d.bytes, x.d.dtype, x.d.op, x.peer, KIND[d.kind], (size_t)d.bytes, d.dtype, d.op);
      c->err = E_PARA; return false;
    }
    size_t k = std::min(CHUNK, x.bytes - x.off);
    memcpy(x.buf + x.off, b.data[r & 1], k); x.off += k;
    b.rd.store(r + 1, std::memory_order_release); ring(c, x.peer);
    if (x.off >= x.bytes) { x.done = true; left--; }
    return true;
  };
  while (left) {
    uint32_t v = c->shm->bell[c->rank].load();
    bool any = false; std::vector<char> busy(2 * c->n, 0);   // FIFO per (peer, direction)
    for (size_t i = 0; i < it.size(); i++) {
      if (it[i].done) continue;
      char& b = busy[2 * it[i].peer + it[i].send];
      if (b && !(it[i].send)) continue;
      if (b) continue;
      while (!it[i].done && step(i)) any = true;
      if (c->err) return c->err;
      if (!it[i].done) b = 1;
    }
    if (!left) break;
    if (!any) {
      futex_wait(&c->shm->bell[c->rank], v);
      if (std::chrono::steady_clock::now() - t0 > std::chrono::seconds(limit)) {
        fprintf(stderr, "[simulated NPU] HCCL timeout: %s rank %u/%u in %s, %zu messages outstanding\n", c->name.c_str(), c->rank, c->n, KIND[kind], left);
        return c->err = E_TIMEOUT; }
    }
  }
  return OK;
}

// ---- local reduction
static float h2f(uint16_t h) { _Float16 x; memcpy(&x, &h, 2); return (float)x; }
static uint16_t f2h(float f) { _Float16 x = (_Float16)f; uint16_t h; memcpy(&h, &x, 2); return h; }
static float b2f(uint16_t b) { uint32_t u = (uint32_t)b << 16; float f; memcpy(&f, &u, 4); return f; }
static uint16_t f2b(float f) { uint32_t u; memcpy(&u, &f, 4); if (f != f) return 0x7fc0; return (u + 0x7fff + ((u >> 16) & 1)) >> 16; }
template <class A> static A comb(A a, A b, int op) { return op == 0 ? a + b : op == 1 ? a * b : op == 2 ? (a > b || a != a ? a : b) : (a < b || a != a ? a : b); }
template <class T> static void red(char* o, const std::vector<const char*>& in, size_t n, int op) {
  for (size_t i = 0; i < n; i++) { T a = ((const T*)in[0])[i]; for (size_t k = 1; k < in.size(); k++) a = comb<T>(a, ((const T*)in[k])[i], op); ((T*)o)[i] = a; } }
template <float (*L)(uint16_t), uint16_t (*S)(float)> static void red16(char* o, const std::vector<const char*>& in, size_t n, int op) {
  for (size_t i = 0; i < n; i++) { float a = L(((const uint16_t*)in[0])[i]); for (size_t k = 1; k < in.size(); k++) a = comb<float>(a, L(((const uint16_t*)in[k])[i]), op); ((uint16_t*)o)[i] = S(a); } }
static int reduce(char* o, const std::vector<const char*>& in, size_t n, int dt, int op) {
  switch (dt) {
    case 0: red<int8_t>(o, in, n, op); break; case 1: red<int16_t>(o, in, n, op); break; case 2: red<int32_t>(o, in, n, op); break;
    case 3: red16<h2f, f2h>(o, in, n, op); break; case 4: red<float>(o, in, n, op); break; case 5: red<int64_t>(o, in, n, op); break;
    case 7: red<uint8_t>(o, in, n, op); break; case 10: red<double>(o, in, n, op); break; case 11: red16<b2f, f2b>(o, in, n, op); break;
    default: fprintf(stderr, "[simulated NPU] HCCL reduce: unsupported dtype %d\n", dt); return E_NOT_SUPPORT;
  }
  return OK;
}

// ---- grouping (HcclGroupStart/End) and submission
struct Op { Comm* c; void* st; uint32_t kind; std::function<int()> f; std::vector<Item> p2p; };
static thread_local int tl_group = 0; static thread_local std::vector<Op> tl_ops;
static void run_op(Op& o) {
  static long delay = env_long("hccl_delay", 0);
  if (delay) usleep(delay);
  std::lock_guard<std::mutex> l(o.c->mu);
  if (o.c->err) return;
  int r = o.f ? o.f() : exchange(o.c, o.p2p, o.kind);
  if (r) { o.c->err = r; fprintf(stderr, "[simulated NPU] HCCL %s failed on %s rank %u: %d\n", KIND[o.kind], o.c->name.c_str(), o.c->rank, r); }
}
static int submit(Op o) {
  if (tl_group) { tl_ops.push_back(std::move(o)); return OK; }
  auto p = std::make_shared<Op>(std::move(o));
  stream_of(p->st).submit([p] { run_op(*p); });
  return OK;
}
API int HcclGroupStart() { tl_group++; return OK; }
API int HcclGroupEnd() {
  if (--tl_group) return OK;
  auto ops = std::move(tl_ops); tl_ops.clear(); std::map<std::pair<Comm*, void*>, Op> merged;
  for (auto& o : ops) {
    if (o.f) { submit(std::move(o)); continue; }
    auto& m = merged[{o.c, o.st}]; m.c = o.c; m.st = o.st; m.kind = 13;
    for (auto& i : o.p2p) m.p2p.push_back(i);
  }
  for (auto& m : merged) submit(std::move(m.second));
  return OK;
}
static Item mk(Comm* c, bool send, uint32_t peer, const void* b, size_t bytes, uint32_t kind, int dt, int op = 255) {
  Item i; i.send = send; i.peer = peer; i.buf = (char*)b; i.bytes = bytes; i.d = Desc{kind, (uint32_t)dt, (uint32_t)op, 0, bytes, 0}; return i; }

// ---- communicator
static std::atomic<int> g_uid{0};
API int HcclGetRootInfo(void* ri) { memset(ri, 0, 4108); timespec t; clock_gettime(CLOCK_REALTIME, &t);
  snprintf((char*)ri, 128, "megatron_npu_sim_%d_%d_%lx", getpid(), g_uid++, (long)t.tv_nsec); return OK; }
API int HcclCommInitRootInfo(uint32_t n, const void* ri, uint32_t rank, void** out) {
  if (n > 64) return E_NOT_SUPPORT;
  auto c = new Comm; c->name = (const char*)ri; c->n = n; c->rank = rank;
  std::string path = "/" + c->name; c->bytes = 4096 + sizeof(Box) * (size_t)n * n;
  int fd = shm_open(path.c_str(), O_CREAT | O_RDWR, 0600);
  if (fd < 0 || ftruncate(fd, c->bytes)) { perror("megatron_npu_sim shm"); return E_INTERNAL; }
  char* p = (char*)mmap(0, c->bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0); close(fd);
  if (p == MAP_FAILED) { perror("megatron_npu_sim mmap"); return E_INTERNAL; }
  c->shm = (Shm*)p; c->box = (Box*)(p + 4096);
  c->shm->attached++;
  long limit = env_long("hccl_timeout", 300) * 1000;
  for (long i = 0; c->shm->attached < n; i++) { if (i > limit) { fprintf(stderr, "[simulated NPU] HcclCommInitRootInfo: %u of %u ranks attached\n", c->shm->attached.load(), n); shm_unlink(path.c_str()); return E_TIMEOUT; } usleep(1000); }
  if (rank == 0) shm_unlink(path.c_str());
  *out = c; return OK;
}
API int HcclCommInitRootInfoConfig(uint32_t n, const void* ri, uint32_t rank, const void* cfg, void** out) {
  int r = HcclCommInitRootInfo(n, ri, rank, out);
  if (!r && cfg) { const char* nm = (const char*)cfg + 32; if (*nm) ((Comm*)*out)->name = std::string(nm, strnlen(nm, 127)); }
  return r; }
API uint32_t HcclGetCommConfigCapability() { return 12; }
API int HcclCommDestroy(void*) { return OK; }   // leaked on purpose: worker threads may still hold it
API int HcclGetCommName(void* c, char* o) { snprintf(o, 128, "%s", ((Comm*)c)->name.c_str()); return OK; }
API int HcclGetRankSize(void* c, uint32_t* n) { *n = ((Comm*)c)->n; return OK; }
API int HcclGetRankId(void* c, uint32_t* n) { *n = ((Comm*)c)->rank; return OK; }
API int HcclGetCommAsyncError(void* c, int* e) { *e = ((Comm*)c)->err; return OK; }
API const char* HcclGetErrorString(int e) { static const char* s[] = {"no error", "parameter error", "empty pointer", "memory error", "internal error", "not supported", "not found", "unavailable", "syscall error", "timeout"}; return e >= 0 && e < 10 ? s[e] : "remote error"; }
API int HcclSetConfig(int, int) { return OK; }
API int HcclGetConfig(int, int* v) { *v = 0; return OK; }
API int HcclCommResume(void*) { return OK; }
API int HcclCommSuspend(void*) { return OK; }

// ---- collectives
#define C ((Comm*)comm)
API int HcclAllReduce(void* s, void* r, uint64_t n, int dt, int op, void* comm, void* st) {
  size_t b = n * esize(dt); Comm* c = C; count_communication("AllReduce", b);
  return submit({c, st, 2, [=] {
    std::vector<char> tmp(b * c->n); std::vector<Item> it; std::vector<const char*> in;
    for (uint32_t p = 0; p < c->n; p++) { in.push_back(p == c->rank ? (char*)s : &tmp[b * p]); if (p == c->rank) continue;
      it.push_back(mk(c, true, p, s, b, 2, dt, op)); it.push_back(mk(c, false, p, &tmp[b * p], b, 2, dt, op)); }
    int e = exchange(c, it, 2); return e ? e : reduce((char*)r, in, n, dt, op); }, {}});
}
API int HcclReduce(void* s, void* r, uint64_t n, int dt, int op, uint32_t root, void* comm, void* st) {
  size_t b = n * esize(dt); Comm* c = C; count_communication("Reduce", b);
  return submit({c, st, 3, [=] {
    std::vector<Item> it; if (c->rank != root) { it.push_back(mk(c, true, root, s, b, 3, dt, op)); return exchange(c, it, 3); }
    std::vector<char> tmp(b * c->n); std::vector<const char*> in;
    for (uint32_t p = 0; p < c->n; p++) { in.push_back(p == root ? (char*)s : &tmp[b * p]); if (p != root) it.push_back(mk(c, false, p, &tmp[b * p], b, 3, dt, op)); }
    int e = exchange(c, it, 3); return e ? e : reduce((char*)r, in, n, dt, op); }, {}});
}
API int HcclBroadcast(void* buf, uint64_t n, int dt, uint32_t root, void* comm, void* st) {
  size_t b = n * esize(dt); Comm* c = C; count_communication("Broadcast", b); std::vector<Item> it;
  if (c->rank == root) { for (uint32_t p = 0; p < c->n; p++) if (p != root) it.push_back(mk(c, true, p, buf, b, 1, dt)); } else it.push_back(mk(c, false, root, buf, b, 1, dt));
  return submit({c, st, 1, [=]() mutable { return exchange(c, it, 1); }, {}});
}
static int ag_v(const char* name, uint32_t kind, const void* s, char* r, std::vector<size_t> cnt, std::vector<size_t> dsp, int dt, Comm* c, void* st) {
  count_communication(name, cnt[c->rank]);
  return submit({c, st, kind, [=] { std::vector<Item> it;
    for (uint32_t p = 0; p < c->n; p++) { if (p == c->rank) continue; it.push_back(mk(c, true, p, s, cnt[c->rank], kind, dt)); it.push_back(mk(c, false, p, r + dsp[p], cnt[p], kind, dt)); }
    memmove(r + dsp[c->rank], s, cnt[c->rank]); return exchange(c, it, kind); }, {}});
}
static std::vector<size_t> vec(const void* p, uint32_t n, size_t e) { std::vector<size_t> v(n); for (uint32_t i = 0; i < n; i++) v[i] = ((const uint64_t*)p)[i] * e; return v; }
API int HcclAllGather(void* s, void* r, uint64_t n, int dt, void* comm, void* st) {
  size_t b = n * esize(dt); std::vector<size_t> cnt(C->n, b), d(C->n); for (uint32_t i = 0; i < C->n; i++) d[i] = b * i; return ag_v("AllGather", 6, s, (char*)r, cnt, d, dt, C, st); }
API int HcclAllGatherV(void* s, uint64_t, void* r, const void* rc, const void* rd, int dt, void* comm, void* st) {
  return ag_v("AllGatherV", 16, s, (char*)r, vec(rc, C->n, esize(dt)), vec(rd, C->n, esize(dt)), dt, C, st); }
static int rs_v(const char* name, uint32_t kind, const char* s, char* r, std::vector<size_t> cnt, std::vector<size_t> dsp, int dt, int op, Comm* c, void* st) {
  size_t b = cnt[c->rank]; count_communication(name, b);
  return submit({c, st, kind, [=] { std::vector<char> tmp(b * c->n); std::vector<Item> it; std::vector<const char*> in;
    for (uint32_t p = 0; p < c->n; p++) { in.push_back(p == c->rank ? s + dsp[p] : &tmp[b * p]); if (p == c->rank) continue;
      it.push_back(mk(c, true, p, s + dsp[p], cnt[p], kind, dt, op)); it.push_back(mk(c, false, p, &tmp[b * p], b, kind, dt, op)); }
    int e = exchange(c, it, kind); if (e) return e;
    std::vector<char> out(b); e = reduce(out.data(), in, b / esize(dt), dt, op); memcpy(r, out.data(), b); return e; }, {}});
}
API int HcclReduceScatter(void* s, void* r, uint64_t n, int dt, int op, void* comm, void* st) {
  size_t b = n * esize(dt); std::vector<size_t> cnt(C->n, b), d(C->n); for (uint32_t i = 0; i < C->n; i++) d[i] = b * i; return rs_v("ReduceScatter", 7, (char*)s, (char*)r, cnt, d, dt, op, C, st); }
API int HcclReduceScatterV(void* s, const void* sc, const void* sd, void* r, uint64_t, int dt, int op, void* comm, void* st) {
  return rs_v("ReduceScatterV", 17, (char*)s, (char*)r, vec(sc, C->n, esize(dt)), vec(sd, C->n, esize(dt)), dt, op, C, st); }
API int HcclScatter(void* s, void* r, uint64_t n, int dt, uint32_t root, void* comm, void* st) {
  size_t b = n * esize(dt); Comm* c = C; count_communication("Scatter", b);
  return submit({c, st, 12, [=] { std::vector<Item> it;
    if (c->rank == root) { for (uint32_t p = 0; p < c->n; p++) if (p != root) it.push_back(mk(c, true, p, (char*)s + b * p, b, 12, dt)); memmove(r, (char*)s + b * root, b); } else it.push_back(mk(c, false, root, r, b, 12, dt));
    return exchange(c, it, 12); }, {}});
}
static int a2a(const char* name, uint32_t kind, const char* s, std::vector<size_t> sc, std::vector<size_t> sd, char* r, std::vector<size_t> rc, std::vector<size_t> rd, int dt, Comm* c, void* st) {
  size_t tot = 0; for (auto x : sc) tot += x; count_communication(name, tot);
  return submit({c, st, kind, [=] { std::vector<Item> it;
    for (uint32_t p = 0; p < c->n; p++) { if (p == c->rank) continue;
      it.push_back(mk(c, true, p, s + sd[p], sc[p], kind, dt)); it.push_back(mk(c, false, p, r + rd[p], rc[p], kind, dt)); }
    memmove(r + rd[c->rank], s + sd[c->rank], sc[c->rank]); return exchange(c, it, kind); }, {}});
}
API int HcclAlltoAllV(const void* s, const void* sc, const void* sd, int dt, const void* r, const void* rc, const void* rd, int rdt, void* comm, void* st) {
  return a2a("AlltoAllV", 8, (char*)s, vec(sc, C->n, esize(dt)), vec(sd, C->n, esize(dt)), (char*)r, vec(rc, C->n, esize(rdt)), vec(rd, C->n, esize(rdt)), dt, C, st); }
API int HcclAlltoAll(const void* s, uint64_t n, int dt, const void* r, uint64_t, int, void* comm, void* st) {
  size_t b = n * esize(dt); std::vector<size_t> cnt(C->n, b), d(C->n); for (uint32_t i = 0; i < C->n; i++) d[i] = b * i; return a2a("AlltoAll", 10, (char*)s, cnt, d, (char*)r, cnt, d, dt, C, st); }
API int HcclBarrier(void* comm, void* st) { static char z[64]; return HcclAllReduce(z, z, 1, 4, 0, comm, st); }
API int HcclSend(void* b, uint64_t n, int dt, uint32_t peer, void* comm, void* st) { count_communication("Send", n * esize(dt)); return submit({C, st, 4, nullptr, {mk(C, true, peer, b, n * esize(dt), 4, dt)}}); }
API int HcclRecv(void* b, uint64_t n, int dt, uint32_t peer, void* comm, void* st) { count_communication("Recv", n * esize(dt)); return submit({C, st, 4, nullptr, {mk(C, false, peer, b, n * esize(dt), 4, dt)}}); }
struct SR { int type; void* buf; uint64_t count; int dt; uint32_t peer; };
API int HcclBatchSendRecv(SR* x, uint32_t n, void* comm, void* st) {
  std::vector<Item> it; size_t b = 0;
  for (uint32_t i = 0; i < n; i++) { size_t k = x[i].count * esize(x[i].dt); if (x[i].type == 0) b += k;
    if (x[i].peer == C->rank) { fprintf(stderr, "[simulated NPU] BatchSendRecv to self\n"); return E_PARA; }
    it.push_back(mk(C, x[i].type == 0, x[i].peer, x[i].buf, k, 4, x[i].dt)); }
  count_communication("BatchSendRecv", b); return submit({C, st, 13, nullptr, it}); }
