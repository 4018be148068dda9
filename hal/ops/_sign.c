/* What tells one plain dispatched call from another, read off its tensors: see hal/ops/_native.py.

   Plain is a call of which nothing need be asked one by one: every tensor is torch's own, in memory, on one device, and
   nested in its strides; none requires grad, is negated or complex; sizes agree. Of any other there is no signature, and
   the key is made by Python. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>

typedef struct { void *data; struct { int32_t type, id; } device; int32_t ndim;
                 struct { uint8_t code, bits; uint16_t lanes; } dtype;
                 int64_t *shape, *strides; uint64_t byte_offset; } Tensor;
typedef struct { struct { uint32_t major, minor; } version; void *previous; void *allocate, *from_object, *to_object;
                 int (*read)(void *object, Tensor *out); } Exchange;

enum { ARGUMENTS = 24, STATIC = 8, PAIRS = 48, COMPLEX = 5 };
enum { OPTIONAL = 1, ALIGNED = 2, REAL = 4 };      /* of an argument: may be None; what of it counts */

static const Exchange *exchange;
static PyObject *tensor_type, *parameter_type, *grad_enabled, *tracing, *forward, *s_level, *s_grad, *s_neg;

typedef struct { uint8_t flags; int count; int16_t dims[STATIC]; } Argument;
typedef struct {
  PyObject_HEAD
  vectorcallfunc call;
  Py_ssize_t count, pairs;
  Argument args[ARGUMENTS];
  struct { int8_t a, i, b, j; } pair[PAIRS];       /* sizes that agree where both tensors are there */
} Signer;

/* 2: contiguous; 1: the last dim is; 0: neither; -1: strides that don't nest. */
static int32_t stride_class(const Tensor *t) {
  int contiguous = 1;
  int64_t extent = 0, size = 1;
  for (int i = t->ndim - 1; i >= 0; i--) {
    int64_t n = t->shape[i], step = t->strides[i];
    if (n == 1) continue;
    if (n == 0 || step <= extent) return -1;
    contiguous &= step == size;
    extent += (n - 1) * step;
    size *= n;
  }
  if (contiguous) return 2;
  return t->ndim > 0 && (t->strides[t->ndim - 1] == 1 || t->shape[t->ndim - 1] == 1);
}

static int truth(PyObject *of) {
  int found = of == NULL ? -1 : PyObject_IsTrue(of);
  Py_XDECREF(of);
  return found;
}

/* 1: nothing follows what is done here. */
static int untracked(int *grad) {
  PyObject *trace = PyObject_CallNoArgs(tracing), *level = PyObject_GetAttr(forward, s_level);
  int plain = trace == Py_None && level != NULL && PyLong_Check(level) && PyLong_AsLong(level) < 0;
  Py_XDECREF(trace);
  Py_XDECREF(level);
  *grad = truth(PyObject_CallNoArgs(grad_enabled));
  return plain && *grad >= 0;
}

static PyObject *sign(PyObject *object, PyObject *const *args, size_t nargsf, PyObject *names) {
  Signer *self = (Signer *)object;
  int32_t words[2 + ARGUMENTS * (1 + STATIC)];
  Tensor tensors[ARGUMENTS];
  Py_ssize_t w = 2, first = -1;
  int grad;
  if (names != NULL || PyVectorcall_NARGS(nargsf) != self->count || !untracked(&grad)) goto none;
  for (Py_ssize_t n = 0; n < self->count; n++) {
    PyObject *a = args[n];
    const Argument *arg = &self->args[n];
    Tensor *t = &tensors[n];
    if (a == Py_None && arg->flags & OPTIONAL) {
      t->shape = NULL;
      words[w++] = -1;
      continue;
    }
    if (((PyObject *)Py_TYPE(a) != tensor_type && (PyObject *)Py_TYPE(a) != parameter_type) || exchange->read(a, t) != 0
        || t->data == NULL || t->strides == NULL || t->byte_offset != 0 || t->dtype.lanes != 1 || t->dtype.code == COMPLEX
        || t->ndim > 31) goto none;
    if (first < 0) {
      first = n;
      words[0] = t->device.type;
      words[1] = t->device.id;
    }
    if (t->device.type != words[0] || t->device.id != words[1]) goto none;
    int32_t class = stride_class(t), aligned = !(arg->flags & ALIGNED) || ((uintptr_t)t->data & 15) == 0;
    if (class < 0) goto none;
    if (arg->flags & REAL && (truth(PyObject_CallMethodNoArgs(a, s_neg)) != 0
                              || (grad && truth(PyObject_GetAttr(a, s_grad)) != 0))) goto none;
    words[w++] = t->dtype.code | t->dtype.bits << 8 | t->ndim << 16 | class << 24 | aligned << 28;
    for (int i = 0; i < arg->count; i++) {
      int dim = arg->dims[i] < 0 ? arg->dims[i] + t->ndim : arg->dims[i];
      int64_t size = dim >= 0 && dim < t->ndim ? t->shape[dim] : -1;
      if (size > INT32_MAX) goto none;
      words[w++] = (int32_t)size;
    }
  }
  for (Py_ssize_t p = 0; p < self->pairs; p++) {
    const Tensor *a = &tensors[self->pair[p].a], *b = &tensors[self->pair[p].b];
    if (a->shape != NULL && b->shape != NULL
        && (self->pair[p].i >= a->ndim || self->pair[p].j >= b->ndim || a->shape[self->pair[p].i] != b->shape[self->pair[p].j]))
      goto none;
  }
  if (first >= 0) return PyBytes_FromStringAndSize((const char *)words, w * (Py_ssize_t)sizeof(int32_t));
none:
  PyErr_Clear();
  Py_RETURN_NONE;
}

/* Signer(((flags, (dim, ...)), ...), ((a, i, b, j), ...)) */
static int init(PyObject *object, PyObject *given, PyObject *names) {
  Signer *self = (Signer *)object;
  PyObject *args, *pairs;
  (void)names;
  if (!PyArg_ParseTuple(given, "O!O!", &PyTuple_Type, &args, &PyTuple_Type, &pairs)) return -1;
  if (PyTuple_GET_SIZE(args) > ARGUMENTS || PyTuple_GET_SIZE(pairs) > PAIRS) goto much;
  for (Py_ssize_t n = 0; n < PyTuple_GET_SIZE(args); n++) {
    PyObject *dims;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(args, n), "bO!", &self->args[n].flags, &PyTuple_Type, &dims)) return -1;
    if (PyTuple_GET_SIZE(dims) > STATIC) goto much;
    self->args[n].count = (int)PyTuple_GET_SIZE(dims);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(dims); i++)
      self->args[n].dims[i] = (int16_t)PyLong_AsLong(PyTuple_GET_ITEM(dims, i));
  }
  for (Py_ssize_t p = 0; p < PyTuple_GET_SIZE(pairs); p++) {
    int a, i, b, j;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(pairs, p), "iiii", &a, &i, &b, &j)) return -1;
    if (a < 0 || b < 0 || i < 0 || j < 0 || a >= PyTuple_GET_SIZE(args) || b >= PyTuple_GET_SIZE(args) || i > 31 || j > 31)
      goto much;
    self->pair[p].a = (int8_t)a, self->pair[p].i = (int8_t)i, self->pair[p].b = (int8_t)b, self->pair[p].j = (int8_t)j;
  }
  self->count = PyTuple_GET_SIZE(args);
  self->pairs = PyTuple_GET_SIZE(pairs);
  self->call = sign;
  return PyErr_Occurred() ? -1 : 0;
much:
  PyErr_SetString(PyExc_ValueError, "hal: more than a signer has room for");
  return -1;
}

static PyTypeObject signer_type = {
  PyVarObject_HEAD_INIT(NULL, 0)
  .tp_name = "hal.ops._sign.Signer", .tp_basicsize = sizeof(Signer), .tp_new = PyType_GenericNew, .tp_init = init,
  .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL, .tp_call = PyVectorcall_Call,
  .tp_vectorcall_offset = offsetof(Signer, call),
};

/* setup(exchange, Tensor, Parameter, is_grad_enabled, what gives the state of tracing, forward_ad) */
static PyObject *setup(PyObject *module, PyObject *given) {
  PyObject *capsule, *t, *p, *g, *j, *f;
  (void)module;
  if (!PyArg_ParseTuple(given, "OOOOOO", &capsule, &t, &p, &g, &j, &f)) return NULL;
  const Exchange *api = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
  if (api == NULL) return NULL;
  if (api->version.major != 1 || api->read == NULL)
    return PyErr_Format(PyExc_RuntimeError, "DLPack exchange interface %u.%u", api->version.major, api->version.minor);
  exchange = api;
  Py_XSETREF(tensor_type, Py_NewRef(t));
  Py_XSETREF(parameter_type, Py_NewRef(p));
  Py_XSETREF(grad_enabled, Py_NewRef(g));
  Py_XSETREF(tracing, Py_NewRef(j));
  Py_XSETREF(forward, Py_NewRef(f));
  Py_RETURN_NONE;
}

static PyMethodDef functions[] = {{"setup", setup, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "hal_sign", NULL, -1, functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_hal_sign(void) {
  s_level = PyUnicode_InternFromString("_current_level");
  s_grad = PyUnicode_InternFromString("requires_grad");
  s_neg = PyUnicode_InternFromString("is_neg");
  if (s_level == NULL || s_grad == NULL || s_neg == NULL || PyType_Ready(&signer_type) < 0) return NULL;
  PyObject *m = PyModule_Create(&module);
  if (m != NULL && PyModule_AddObjectRef(m, "Signer", (PyObject *)&signer_type) < 0) Py_CLEAR(m);
  return m;
}
