"""How a host module gets a new forward: its class is swapped for a subclass, and nothing else.

The instance's ``__dict__`` stays as it is, so parameters, hooks, ``state_dict()`` and anything that
looks at attributes see the host. The subclass keeps the host's ``__name__``, ``__qualname__`` and
``__module__``; copies and pickles are of the host's class. Undoing is assigning the class back.
"""

from __future__ import annotations

import copyreg
import functools
import inspect
import types
from collections.abc import Callable
from operator import itemgetter
from typing import Any, cast

import torch
from torch import nn

from .capture.watch import plain_attributes

PLAN = "_flashrt_plan"
_NEW = copyreg.__newobj__  # type: ignore[attr-defined]
_RECONSTRUCT = copyreg._reconstructor  # type: ignore[attr-defined]


class Overridden:
    """First base of every bound class; ``isinstance(module, Overridden)`` says it is attached."""

    # No __slots__: with a __dict__ of its own this base has nn.Module's layout, which is what lets
    # __class__ be assigned.
    _flashrt_host: type[nn.Module]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Skip the host's own hook on subclassing: registries and warnings must not see us."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """``type(module)(...)`` makes a host: only the attached module is bound."""
        host = vars(cls).get("_flashrt_host")
        return super().__new__(cls) if host is None else host(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and pickle as the host: its class, and a state without the plan."""
        bound: type = type(self)
        host = vars(bound).get("_flashrt_host", bound)
        reduced = cast("tuple[Any, ...]", super().__reduce_ex__(protocol))
        function, arguments, *rest = reduced
        if function is _NEW and arguments == (bound,):
            # pickle insists that copyreg.__newobj__ gets the object's own class.
            function, arguments = _RECONSTRUCT, (host, object, None)
        arguments = tuple(host if a is bound else a for a in arguments)
        if rest and isinstance(rest[0], dict):
            rest[0] = {k: v for k, v in rest[0].items() if k != PLAN}
        return (function, arguments, *rest)


def host_class(module: nn.Module) -> type[nn.Module]:
    """The class that ``module`` has when nothing is attached.

    A class made from a bound one, as parametrisations do, is somebody else's and its own.
    """
    kind: type[nn.Module] = type(module)
    host: type[nn.Module] = vars(kind).get("_flashrt_host", kind)
    return host


class Binder:
    """Swaps classes of modules and can put every one of them back.

    Classes are made per binder and per (host class, key), so that all layers of a model share one
    and two plans share none.
    """

    def __init__(self) -> None:
        self._classes: dict[tuple[type[nn.Module], tuple[Any, ...]], type[nn.Module]] = {}
        self._keys: dict[int, tuple[Any, ...]] = {}
        self._bound: dict[int, tuple[nn.Module, type[nn.Module], type[nn.Module]]] = {}

    def override(self, module: nn.Module, key: Any, **methods: Any) -> None:
        """Give ``module`` other methods; a second call on the same module adds to the first.

        Args:
            key: hashable; equal keys on equal host classes must mean equal ``methods``.
            methods: plain functions that take the module as ``self``, or properties.
        """
        host = host_class(module)
        before = self._keys.get(id(module), ())
        if isinstance(module, Overridden) and id(module) not in self._bound:
            raise ValueError(f"attach: {host.__name__} belongs to another plan; detach that first")
        keys = (*before, key)
        made = self._classes.get((host, keys))
        if made is None:
            inherited = vars(type(module))["_flashrt_own"] if before else {}
            made = self._classes[host, keys] = _subclass(host, {**inherited, **methods})
        object.__setattr__(module, "__class__", made)
        self._keys[id(module)] = keys
        self._bound[id(module)] = (module, host, made)

    def restore(self) -> None:
        """Put every class back.

        Raises:
            RuntimeError: something else has changed the class since; all others are restored.
        """
        foreign = []
        for module, host, made in self._bound.values():
            if type(module) is made:
                object.__setattr__(module, "__class__", host)
            else:
                foreign.append(type(module).__name__)
        if not foreign:
            self._empty_classes()
        self._bound.clear()
        self._keys.clear()
        if foreign:
            raise RuntimeError(
                f"detach: the class of {len(foreign)} modules was changed after attach and is left "
                f"as it is: {', '.join(sorted(set(foreign)))}"
            )

    def _empty_classes(self) -> None:
        """Let go of what the methods hold (graphs, the model): a class lives until a collection."""
        for made in self._classes.values():
            for name in vars(made)["_flashrt_own"]:
                delattr(made, name)
            made._flashrt_own = {}  # type: ignore[attr-defined]
        self._classes.clear()


def _subclass(host: type[nn.Module], methods: dict[str, Any]) -> type[nn.Module]:
    wrapped = {name: _like(getattr(host, name, None), f) for name, f in methods.items()}
    namespace: dict[str, Any] = {
        "__module__": host.__module__,
        "__qualname__": host.__qualname__,
        "__doc__": host.__doc__,
        "_flashrt_host": host,
        "_flashrt_own": methods,
        **wrapped,
    }
    metaclass: Any = type(host)
    return cast("type[nn.Module]", metaclass(host.__name__, (Overridden, host), namespace))


def _like(host: Callable[..., Any] | None, function: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of ``function`` with the name, documentation and signature of the host's method."""
    if host is None or not isinstance(function, types.FunctionType):
        return function
    method = types.FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    method.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(method, host)
    method.__signature__ = inspect.signature(host)  # type: ignore[attr-defined]
    return method


def guarded(
    host: type[nn.Module],
    fast: Callable[..., Any],
    *,
    unary: bool,
    example: nn.Module,
    dtypes: tuple[torch.dtype, ...],
    device: str,
    before_host: Callable[[nn.Module], None] | None = None,
) -> Callable[..., Any]:
    """A forward that runs ``fast`` where the proof holds and the host's own everywhere else.

    The host answers in training mode, under autograd or autocast, for inputs of another dtype or
    device, when a module inside has a hook, another class (an adapter, a parametrisation) or
    another number (an eps, a scale) than at the proof, and whenever ``fast`` returns
    ``NotImplemented``; ``before_host`` may raise then.
    """
    intact = _intact(example)
    autocast = torch.is_autocast_enabled
    grad = torch.is_grad_enabled
    argument = next(iter(list(inspect.signature(host.forward).parameters)[1:]), "")

    def host_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if before_host is not None:
            before_host(self)
        return host.forward(self, *args, **kwargs)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else kwargs.get(argument)
        if (
            self.training
            or not isinstance(x, torch.Tensor)
            or x.dtype not in dtypes
            or x.device.type != device
            or autocast(device)
            or not intact(self)
            or (unary and len(args) + len(kwargs) > 1 and not _alone(args, kwargs))
        ):
            return host_forward(self, *args, **kwargs)
        if unary:
            if x.dim() and x.stride(-1) != 1:
                x = x.contiguous()
            args, kwargs = (x,), {}
        if not grad():
            result = fast(self, *args, **kwargs)
        elif x.requires_grad:
            result = NotImplemented
        else:
            with torch.no_grad():
                result = fast(self, *args, **kwargs)
        return host_forward(self, *args, **kwargs) if result is NotImplemented else result

    return forward


def _alone(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call has one argument, the others being None."""
    return sum(a is not None for a in (*args, *kwargs.values())) == 1


def _intact(example: nn.Module) -> Callable[[nn.Module], bool]:
    """A check that a module and those inside are of the proven classes and carry no own code.

    Own code is a forward of the instance, or inside the region a hook. Plain attributes must have
    the proven values.
    """
    numbers = tuple(
        (i, itemgetter(*values), itemgetter(*values)(values))
        for i, values in enumerate(map(plain_attributes, example.modules()))
        if values
    )
    order = {name: i for i, (name, _) in enumerate(example.named_modules())}
    steps = []
    for name, module in example.named_modules():
        parent, _, child = name.rpartition(".")
        if name:
            steps.append((order[parent], child, host_class(module)))
    host = host_class(example)

    def intact(self: nn.Module) -> bool:
        if host_class(self) is not host:
            return False
        found = [self]
        for parent, name, kind in steps:
            part = found[parent]._modules.get(name)
            if part is None:
                return False
            own = part.__dict__
            if (
                (type(part) is not kind and host_class(part) is not kind)
                or own["_forward_hooks"]
                or own["_forward_pre_hooks"]
                or "forward" in own
            ):
                return False
            found.append(part)
        try:
            for i, read, values in numbers:
                if read(found[i].__dict__) != values:
                    return False
        except KeyError:
            return False
        return True

    return intact


def proven_numbers(module: nn.Module) -> tuple[Any, ...]:
    """Plain attributes of a module and those inside, to tell kinds of regions apart."""
    return tuple(tuple(plain_attributes(inner).items()) for inner in module.modules())
