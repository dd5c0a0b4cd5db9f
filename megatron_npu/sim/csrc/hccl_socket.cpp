#include "hccl_socket.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <mutex>
#include <set>

namespace sim::hccl {

namespace {

constexpr int kBacklog = 256;

// The open sockets of this process. Never destroyed: threads may still run when the process ends.
auto& open_mutex = *new std::mutex;
auto& open_files = *new std::set<int>;

void close_in_child() {
  for (int file : open_files) close(file);
  open_files.clear();
  open_mutex.unlock();
}

void remember(int file) {
  static const int once = pthread_atfork([] { open_mutex.lock(); }, [] { open_mutex.unlock(); }, close_in_child);
  (void)once;
  std::lock_guard<std::mutex> lock(open_mutex);
  open_files.insert(file);
}

// Waits until a file is ready; false, with errno, if it is not in time.
bool ready(int file, short events, Deadline deadline) {
  for (;;) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
    pollfd entry{file, events, 0};
    const int found = poll(&entry, 1, static_cast<int>(std::clamp<int64_t>(left.count() + 1, 0, 1 << 30)));
    if (found > 0) return true;
    if (found == 0) return errno = ETIMEDOUT, false;
    if (errno != EINTR) return false;
  }
}

using Addresses = std::unique_ptr<addrinfo, void (*)(addrinfo*)>;

Addresses addresses_of(const std::string& address, uint16_t port) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  if (getaddrinfo(address.c_str(), std::to_string(port).c_str(), &hints, &found) != 0) errno = EADDRNOTAVAIL;
  return Addresses(found, [](addrinfo* each) {
    if (each) freeaddrinfo(each);
  });
}

void send_at_once(int file) {
  const int on = 1;
  setsockopt(file, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

}  // namespace

Socket::Socket(int file) : file_(file) {
  if (file >= 0) remember(file);
}

Socket::~Socket() {
  if (file_ < 0) return;
  std::lock_guard<std::mutex> lock(open_mutex);
  if (open_files.erase(file_)) close(file_);  // not in a child, where the number may be another file's
}

Socket& Socket::operator=(Socket&& other) noexcept {
  std::swap(file_, other.file_);
  return *this;
}

Socket Socket::listening(const std::string& address, uint16_t* port) {
  const Addresses found = addresses_of(address, 0);
  if (!found) return {};
  Socket place(socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  sockaddr_storage own{};
  socklen_t length = sizeof own;
  if (!place.valid() || bind(place.file_, found->ai_addr, found->ai_addrlen) != 0 ||
      listen(place.file_, kBacklog) != 0 ||
      getsockname(place.file_, reinterpret_cast<sockaddr*>(&own), &length) != 0) {
    return {};
  }
  *port = ntohs(own.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&own)->sin6_port
                                          : reinterpret_cast<sockaddr_in*>(&own)->sin_port);
  return place;
}

Socket Socket::connected(const std::string& address, uint16_t port, Deadline deadline) {
  const Addresses found = addresses_of(address, port);
  if (!found) return {};
  Socket result(socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!result.valid()) return {};
  if (connect(result.file_, found->ai_addr, found->ai_addrlen) != 0 && errno != EINPROGRESS) return {};
  int error = 0;
  socklen_t length = sizeof error;
  if (!ready(result.file_, POLLOUT, deadline)) return {};
  if (getsockopt(result.file_, SOL_SOCKET, SO_ERROR, &error, &length) != 0 || error != 0) {
    errno = error;
    return {};
  }
  send_at_once(result.file_);
  return result;
}

Socket Socket::accept(Deadline deadline) {
  if (!ready(file_, POLLIN, deadline)) return {};
  Socket result(accept4(file_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (result.valid()) send_at_once(result.file_);
  return result;
}

bool Socket::send(const void* data, size_t bytes, Deadline deadline) {
  for (const char* next = static_cast<const char*>(data); bytes != 0;) {
    const ssize_t sent = ::send(file_, next, bytes, MSG_NOSIGNAL);
    if (sent < 0 && errno != EAGAIN && errno != EINTR) return false;
    if (sent > 0) next += sent, bytes -= sent;
    if (sent < 0 && !ready(file_, POLLOUT, deadline)) return false;
  }
  return true;
}

bool Socket::receive(void* data, size_t bytes, Deadline deadline) {
  for (char* next = static_cast<char*>(data); bytes != 0;) {
    const ssize_t got = recv(file_, next, bytes, 0);
    if (got == 0) return errno = 0, false;
    if (got < 0 && errno != EAGAIN && errno != EINTR) return false;
    if (got > 0) next += got, bytes -= got;
    if (got < 0 && !ready(file_, POLLIN, deadline)) return false;
  }
  return true;
}

}  // namespace sim::hccl
