// An instruction on 32 lanes at once: all of them in one loop that the compiler makes vectors of; the result goes to those that run.
#pragma once
#include "machine.h"

template <class D> inline void keep(D* d, const D* made, u32 lanes) {
  each(lanes, [&](u32 l) { d[l] = made[l]; });
}

template <class D, class A, auto F> void unary(Warp& w, const Instruction& i, u32 lanes) {
  D* d = w.in<D>(i.o[0]);
  const A* a = w.in<A>(i.o[1]);
  if (lanes == ALL) {
#pragma GCC ivdep
    for (int l = 0; l < 32; l++) d[l] = F(a[l]);
  } else {
    D made[32];
    for (int l = 0; l < 32; l++) made[l] = F(a[l]);
    keep(d, made, lanes);
  }
}
template <class D, class A, class B, auto F> void binary(Warp& w, const Instruction& i, u32 lanes) {
  D* d = w.in<D>(i.o[0]);
  const A* a = w.in<A>(i.o[1]);
  const B* b = w.in<B>(i.o[2]);
  if (lanes == ALL) {
#pragma GCC ivdep
    for (int l = 0; l < 32; l++) d[l] = F(a[l], b[l]);
  } else {
    D made[32];
    for (int l = 0; l < 32; l++) made[l] = F(a[l], b[l]);
    keep(d, made, lanes);
  }
}
template <class D, class A, class B, class C, auto F> void ternary(Warp& w, const Instruction& i, u32 lanes) {
  D* d = w.in<D>(i.o[0]);
  const A* a = w.in<A>(i.o[1]);
  const B* b = w.in<B>(i.o[2]);
  const C* c = w.in<C>(i.o[3]);
  if (lanes == ALL) {
#pragma GCC ivdep
    for (int l = 0; l < 32; l++) d[l] = F(a[l], b[l], c[l]);
  } else {
    D made[32];
    for (int l = 0; l < 32; l++) made[l] = F(a[l], b[l], c[l]);
    keep(d, made, lanes);
  }
}
template <class A, auto F> void compare(Warp& w, const Instruction& i, u32 lanes) {
  const A* a = w.in<A>(i.o[1]);
  const A* b = w.in<A>(i.o[2]);
  u32 made = 0;
  for (int l = 0; l < 32; l++) made |= static_cast<u32>(F(a[l], b[l])) << l;
  w.set_predicate(i.o[0], lanes, made);
}
