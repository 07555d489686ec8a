"""Shows objects, as MIME bundles, and matplotlib's figures; imports only the standard library and siblings.

numpy, pandas, matplotlib and IPython are never imported here: what a program has not imported it cannot show.
"""

import base64
import builtins
import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import io
import itertools
import json
import json.encoder
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, cast

from fumehood.sandboxd.inside import bounds, streams, wire

globals()["__builtins__"] = dict(vars(builtins))  # see streams.py

_PYPLOT = "matplotlib.pyplot"
_ORDER = "_fumehood_order"
_SAVED = "_fumehood_saved"
_PICTURES = {"image/png": b"\x89PNG\r\n\x1a\n", "image/jpeg": b"\xff\xd8\xff"}
# In IPython's order of names; a picture that has a PNG form needs no JPEG one.
_METHODS = {
    "text/html": "_repr_html_",
    "text/markdown": "_repr_markdown_",
    "image/svg+xml": "_repr_svg_",
    "image/png": "_repr_png_",
    "image/jpeg": "_repr_jpeg_",
    "text/latex": "_repr_latex_",
    "application/json": "_repr_json_",
}

type Bundle = dict[str, str]


_quote: Callable[[str], str] = json.encoder.encode_basestring_ascii


def encode(texts: dict[str, str]) -> bytes:
    """JSON, by the C function alone: json.dumps() needs builtins that a program may have replaced."""
    return "{{{}}}".format(
        ",".join(f"{_quote(key)}:{_quote(value)}" for key, value in texts.items())
    ).encode()


class Displays:
    """What one runner shows; `limit` bounds a message in bytes, `count` the displays of one call."""

    def __init__(self, output: streams.Output) -> None:
        self.limit = bounds.DISPLAY_LIMIT
        self.count = bounds.DISPLAYS
        self._output = output
        self._shown = 0
        self._full = False

    def begin(self) -> None:
        self._shown = 0
        self._full = False

    def display(self, *objects: object, raw: bool = False, **_options: object) -> None:
        """Show each object as the last expression of a cell would be shown, `None` included."""
        for item in objects:
            if raw and isinstance(item, dict):
                bundle: Bundle = {}
                _merge(bundle, cast(object, item))
                self._send(bundle)
            else:
                self._send(self._bundle(item))

    def result(self, value: object) -> None:
        self._message(wire.Kind.RESULT, self._bundle(value))

    def _send(self, bundle: Bundle) -> None:
        if self._output.forked:
            # A child process has no channel; what it shows can still be read.
            self._output.text(wire.Kind.STDOUT, _clean(bundle.get("text/plain", "")).encode() + b"\n")
            return
        self._shown += 1
        if self._shown <= self.count:
            self._message(wire.Kind.DISPLAY, bundle)
        elif self._shown == self.count + 1:
            self._note(f"[displays dropped: more than {self.count} in one call]")

    def _message(self, kind: wire.Kind, bundle: Bundle) -> None:
        if not self._output.message(kind, self._body(bundle)) and not self._full:
            self._full = True
            self._note(f"[display left out: more than {self._output.display_bytes} bytes shown in this call]")

    def _note(self, line: str) -> None:
        self._output.text(wire.Kind.STDERR, _clean(line).encode() + b"\n")

    def _body(self, bundle: Bundle) -> bytes:
        """The message; forms that are too large are left out, the largest first, text last and cut."""
        if len(bundle) > bounds.MIME_TYPES:
            bundle = self._fewer(bundle)
        bundle = {_clean(kind): _clean(value) for kind, value in bundle.items()}
        plain = bundle.get("text/plain", "")
        most = self._output.limit
        if len(plain) > most:
            bundle["text/plain"] = f"{plain[:most]}\n[output truncated: more than {most} bytes]"
        body = encode(bundle)
        while len(body) > self.limit:
            rich = [kind for kind in bundle if kind != "text/plain"]
            if rich:
                kind = max(rich, key=lambda name: len(bundle[name]))
                note = f"[{kind} dropped: {len(bundle.pop(kind))} bytes, more than {self.limit}]"
                bundle["text/plain"] = f"{bundle.get('text/plain', '')}\n{note}".lstrip("\n")
            else:
                # A character takes at most twelve bytes of JSON; the next round is the last.
                bundle["text/plain"] = bundle["text/plain"][: max(0, self.limit // 12 - 64)] + "\n[truncated]"
                return encode(bundle)
            body = encode(bundle)
        return body

    def _fewer(self, bundle: Bundle) -> Bundle:
        """The first forms, and plain text in any case."""
        kinds = sorted(bundle, key=lambda kind: kind != "text/plain")[: bounds.MIME_TYPES]
        self._note(f"[{len(bundle) - len(kinds)} of {len(bundle)} forms of a display left out]")
        return {kind: bundle[kind] for kind in kinds}

    # --- one object -------------------------------------------------------------------------------

    def _bundle(self, value: object) -> Bundle:
        figure = _figure_class()
        if figure is not None and isinstance(value, figure):
            try:
                return _picture(value)
            finally:
                _close(value)  # else it would be shown again at the end of the call
        bundle = {"text/plain": repr(value)}
        if not isinstance(value, type):
            self._call(value, "_repr_mimebundle_", lambda found: _merge(bundle, found))
            for kind, method in _METHODS.items():
                if kind not in bundle and not (kind == "image/jpeg" and "image/png" in bundle):
                    self._call(value, method, lambda found, kind=kind: bundle.update({kind: _text(found)}))
        return bundle

    def _call(self, value: object, name: str, use: Callable[[Any], None]) -> None:
        """Use what a method gives; looked up in the class, so that proxies and mocks show nothing."""
        if getattr(type(value), name, None) is None:
            return
        try:
            method = getattr(value, name, None)
            options = {"include": None, "exclude": None} if name == "_repr_mimebundle_" else {}
            found = method(**options) if callable(method) else None
            if isinstance(found, tuple) and found and name != "_repr_json_":
                found = cast(tuple[Any, ...], found)[0]  # (data, metadata)
            if found is not None:
                use(found)
        except NotImplementedError:
            pass
        except Exception as error:
            # The plain text is still shown, and whoever wrote the method learns of it.
            self._note(f"[{type(value).__name__}.{name} failed: {type(error).__name__}: {error}]")

    # --- matplotlib -------------------------------------------------------------------------------

    def show_figures(self) -> None:
        """Show and close every open figure, in the order of their making."""
        managers = _managers()
        try:
            for manager in managers:
                bundle = _picture(manager.canvas.figure)
                if len(bundle) > 1:  # there is something to be seen
                    self._send(bundle)
        finally:
            if managers:
                close_figures()

    def hook_matplotlib(self) -> None:
        """Let `show()` show; now if pyplot is there, else as soon as the program imports it."""
        if _PYPLOT in sys.modules:
            self._patch(sys.modules[_PYPLOT])
        else:
            sys.meta_path.insert(0, _AfterImport(_PYPLOT, self._patch))

    def _patch(self, pyplot: ModuleType) -> None:
        bases: Any = sys.modules["matplotlib.backend_bases"]
        manager_class: Any = bases.FigureManagerBase
        make = manager_class.__init__
        numbers = itertools.count()

        def init(manager: Any, *args: Any, **kwargs: Any) -> None:
            setattr(manager, _ORDER, next(numbers))
            make(manager, *args, **kwargs)

        def show_one(manager: Any) -> None:
            self.display(manager.canvas.figure)

        def show(*_args: object, **_kwargs: object) -> None:
            """Show all open figures and close them."""
            self.show_figures()

        figure_class: Any = sys.modules["matplotlib.figure"].Figure
        save = figure_class.savefig

        @functools.wraps(save)
        def savefig(figure: Any, fname: Any, *args: Any, **kwargs: Any) -> None:
            save(figure, fname, *args, **kwargs)
            _note_saved(figure, fname)

        figure_class.savefig = savefig
        manager_class.__init__ = init
        manager_class.show = show_one
        cast(Any, pyplot).show = show


def _figure_class() -> type | None:
    return getattr(sys.modules.get("matplotlib.figure"), "Figure", None)


def _gcf() -> Any:
    return getattr(sys.modules.get("matplotlib._pylab_helpers"), "Gcf", None)


def _managers() -> list[Any]:
    gcf = _gcf()
    if gcf is None or not gcf.figs:
        return []
    return sorted(gcf.figs.values(), key=lambda manager: getattr(manager, _ORDER, -1))


def _close(figure: object) -> None:
    gcf = _gcf()
    if gcf is not None and gcf.figs:
        gcf.destroy_fig(figure)


def close_figures() -> None:
    """Forget every open figure, drawn or not; an interrupt may have left one half drawn."""
    gcf = _gcf()
    if gcf is not None and gcf.figs:
        with contextlib.suppress(Exception):
            gcf.destroy_all()
        gcf.figs.clear()


def _note_saved(figure: Any, name: object) -> None:
    """Remember the file that shows a figure as it is now; `stale` becomes true with its next change."""
    with contextlib.suppress(Exception):
        path = os.path.abspath(cast(str, name))
        setattr(figure, _SAVED, (path, _stamp(os.stat(path))))
        figure.stale = False


def _stamp(about: os.stat_result) -> tuple[int, int, int]:
    return about.st_ino, about.st_ctime_ns, about.st_size


def _saved_picture(figure: Any) -> Bundle:
    """The picture that was saved of a figure, if neither has changed since: then it is not drawn once more, and whoever
    compares finds that the two are one.
    """
    with contextlib.suppress(Exception):
        path, stamp = getattr(figure, _SAVED)
        if figure.stale or stamp != _stamp(os.stat(path)) or stamp[2] > bounds.DISPLAY_LIMIT // 2:
            return {}
        with open(path, "rb") as file:
            content = file.read()
        for kind, start in _PICTURES.items():
            if content.startswith(start):
                return {kind: base64.b64encode(content).decode()}
    return {}


def _picture(figure: Any) -> Bundle:
    bundle = {"text/plain": repr(figure)}
    if saved := _saved_picture(figure):
        return bundle | saved
    if figure.axes or figure.lines or figure.texts or figure.images or figure.patches:
        buffer = io.BytesIO()
        face = figure.get_facecolor()
        figure.canvas.print_figure(buffer, format="png", dpi=figure.dpi, bbox_inches="tight", facecolor=face)
        bundle["image/png"] = base64.b64encode(buffer.getbuffer()).decode()
    return bundle


def _merge(bundle: Bundle, found: object) -> None:
    if isinstance(found, dict):
        for kind, value in cast(dict[object, object], found).items():
            if value is not None:
                bundle[str(kind)] = _text(value)


def _text(value: object) -> str:
    """Text as it is, bytes in base64, anything else as JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        return base64.b64encode(cast(bytes, value)).decode()
    return json.dumps(value)


def _clean(text: str) -> str:
    """Without lone surrogates, which the other side would refuse."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


# --- modules that appear when a program imports them ----------------------------------------------------


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls back when one module has been imported."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._then = then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                self._wrap(spec.loader)
                return spec
        return None

    def _wrap(self, loader: importlib.abc.Loader) -> None:
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            with contextlib.suppress(ValueError):
                sys.meta_path.remove(self)
            self._then(module)

        cast(Any, loader).exec_module = exec_module


class _IPython(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands in for `IPython.display`, which models import out of habit, where IPython is not installed.

    It is asked last, so a real IPython wins (`offer_ipython` lends it our `display`: without its own shell it would
    only print), and it makes no module before one is asked for: libraries
    look into `sys.modules` to find out whether they run under IPython.
    """

    def __init__(self, displays: Displays) -> None:
        self._displays = displays

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002 (signature of a finder)
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname in {"IPython", "IPython.display"}:
            return importlib.util.spec_from_loader(fullname, self, is_package=fullname == "IPython")
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return ModuleType(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        names = vars(module)
        if module.__name__ == "IPython":
            names.update(__version__="0.0.0", version_info=(0, 0, 0), get_ipython=_no_ipython)
            return
        names.update(display=self._displays.display, clear_output=_ignore)
        names.update({kind.__name__: kind for kind in (Image, HTML, Markdown, SVG, JSON, Latex, Math)})


def offer_ipython(displays: Displays) -> None:
    def lend(module: ModuleType) -> None:
        vars(module).update(display=displays.display, clear_output=_ignore)

    sys.meta_path.insert(0, _AfterImport("IPython.display", lend))
    sys.meta_path.append(_IPython(displays))


def _no_ipython() -> None:
    return None


def _ignore(*_args: object, **_kwargs: object) -> None:
    return None


class _Shown:
    """Data, or a file that holds it, with a way to be shown."""

    _binary = False

    def __init__(
        self, data: Any = None, url: str | None = None, filename: str | None = None, **_options: object
    ) -> None:
        if filename is None and self._binary and isinstance(data, str):
            # IPython's Image takes a file name or an address in the first place as well.
            data, url, filename = (None, data, None) if "://" in data else (None, url, data)
        if filename is not None:
            with open(filename, "rb") as file:
                data = file.read()
            if not self._binary:
                data = data.decode()
        self.data = data
        self.url = url
        self.filename = filename

    def __repr__(self) -> str:
        return f"<IPython.display.{type(self).__name__} object>"


class HTML(_Shown):
    def _repr_html_(self) -> Any:
        return self.data


class Markdown(_Shown):
    def _repr_markdown_(self) -> Any:
        return self.data


class SVG(_Shown):
    def _repr_svg_(self) -> Any:
        return self.data


class JSON(_Shown):
    def _repr_json_(self) -> Any:
        return json.loads(self.data) if isinstance(self.data, str) else self.data


class Latex(_Shown):
    def _repr_latex_(self) -> Any:
        return self.data


class Math(_Shown):
    def _repr_latex_(self) -> str:
        return f"$\\displaystyle {str(self.data).strip('$')}$"


class Image(_Shown):
    _binary = True

    def _repr_mimebundle_(self, **_options: object) -> dict[str, object]:
        data = self.data
        if data is None:
            return {"text/html": f'<img src="{self.url}"/>'} if self.url else {}
        kinds = {b"\xff\xd8": "image/jpeg", b"GI": "image/gif", b"RI": "image/webp"}
        return {kinds.get(bytes(data[:2]), "image/png"): data}
