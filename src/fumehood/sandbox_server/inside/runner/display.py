"""Publishes displayed objects as MIME bundles, and matplotlib's figures.

numpy, pandas, matplotlib and IPython are never imported here: a program can only show what it has imported.
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

from fumehood.sandbox_server.inside import framing
from fumehood.sandbox_server.inside.runner import output_capture, output_limits

globals()["__builtins__"] = dict(vars(builtins))  # see output_capture.py

_PYPLOT = "matplotlib.pyplot"
_ORDER_ATTRIBUTE = "_fumehood_order"
_SAVED_ATTRIBUTE = "_fumehood_saved"
_PICTURE_SIGNATURES = {"image/png": b"\x89PNG\r\n\x1a\n", "image/jpeg": b"\xff\xd8\xff"}
# A picture with a PNG form needs no JPEG form.
_REPR_METHODS = {
    "text/html": "_repr_html_",
    "text/markdown": "_repr_markdown_",
    "image/svg+xml": "_repr_svg_",
    "image/png": "_repr_png_",
    "image/jpeg": "_repr_jpeg_",
    "text/latex": "_repr_latex_",
    "application/json": "_repr_json_",
}

type MimeBundle = dict[str, str]

_quote: Callable[[str], str] = json.encoder.encode_basestring_ascii


def encode_json(texts: dict[str, str]) -> bytes:
    """Encode JSON with the C function only: json.dumps() needs builtins that a program may have replaced."""
    return "{{{}}}".format(
        ",".join(f"{_quote(key)}:{_quote(value)}" for key, value in texts.items())
    ).encode()


class DisplayPublisher:
    """Sends displays and results, within the limits of one call."""

    def __init__(self, output: output_capture.OutputQueue) -> None:
        self._output = output
        self._published = 0
        self._is_full = False

    def begin_call(self) -> None:
        self._published = 0
        self._is_full = False

    def display(self, *objects: object, raw: bool = False, **_options: object) -> None:
        """Show each object like the last expression of a cell, `None` too; `raw`: dicts are MIME bundles."""
        for item in objects:
            if raw and isinstance(item, dict):
                bundle: MimeBundle = {}
                _merge_mime_types(bundle, cast(object, item))
                self._publish(bundle)
            else:
                self._publish(self._make_bundle(item))

    def publish_result(self, value: object) -> None:
        """Send the value of a cell's last expression."""
        self._send_bundle(framing.MessageKind.RESULT, self._make_bundle(value))

    def _publish(self, bundle: MimeBundle) -> None:
        if self._output.is_forked:
            # A child process has no channel; print the text instead.
            self._output.write_text(
                framing.MessageKind.STDOUT, _replace_surrogates(bundle.get("text/plain", "")).encode() + b"\n"
            )
            return
        self._published += 1
        if self._published <= output_limits.MAX_DISPLAYS:
            self._send_bundle(framing.MessageKind.DISPLAY, bundle)
        elif self._published == output_limits.MAX_DISPLAYS + 1:
            self._write_note(f"[displays dropped: more than {output_limits.MAX_DISPLAYS} in one call]")

    def _send_bundle(self, kind: framing.MessageKind, bundle: MimeBundle) -> None:
        if not self._output.send_message(kind, self._encode_bundle(bundle)) and not self._is_full:
            self._is_full = True
            self._write_note(
                f"[display left out: more than {self._output.max_display_bytes} bytes shown in this call]"
            )

    def _write_note(self, line: str) -> None:
        self._output.write_text(framing.MessageKind.STDERR, _replace_surrogates(line).encode() + b"\n")

    def _encode_bundle(self, bundle: MimeBundle) -> bytes:
        """Encode a bundle; drop the largest forms until it fits, truncate the text last."""
        if len(bundle) > output_limits.MAX_MIME_TYPES:
            bundle = self._drop_forms(bundle)
        bundle = {_replace_surrogates(kind): _replace_surrogates(value) for kind, value in bundle.items()}
        plain = bundle.get("text/plain", "")
        max_text = self._output.max_bytes
        if len(plain) > max_text:
            bundle["text/plain"] = f"{plain[:max_text]}\n[output truncated: more than {max_text} bytes]"
        body = encode_json(bundle)
        while len(body) > output_limits.MAX_DISPLAY_BYTES:
            rich = [kind for kind in bundle if kind != "text/plain"]
            if rich:
                kind = max(rich, key=lambda name: len(bundle[name]))
                note = f"[{kind} dropped: {len(bundle.pop(kind))} bytes, more than {output_limits.MAX_DISPLAY_BYTES}]"
                bundle["text/plain"] = f"{bundle.get('text/plain', '')}\n{note}".lstrip("\n")
            else:
                # A character takes at most twelve bytes of JSON, so this fits.
                bundle["text/plain"] = (
                    bundle["text/plain"][: output_limits.MAX_DISPLAY_BYTES // 12 - 64] + "\n[truncated]"
                )
                return encode_json(bundle)
            body = encode_json(bundle)
        return body

    def _drop_forms(self, bundle: MimeBundle) -> MimeBundle:
        """Keep plain text and the first forms."""
        kinds = sorted(bundle, key=lambda kind: kind != "text/plain")[: output_limits.MAX_MIME_TYPES]
        self._write_note(f"[{len(bundle) - len(kinds)} of {len(bundle)} forms of a display left out]")
        return {kind: bundle[kind] for kind in kinds}

    # --- one object -------------------------------------------------------------------------------

    def _make_bundle(self, value: object) -> MimeBundle:
        figure = _figure_class()
        if figure is not None and isinstance(value, figure):
            try:
                return _render_figure(value)
            finally:
                _close_figure(value)  # else the end of the call shows it again
        bundle = {"text/plain": repr(value)}
        if not isinstance(value, type):
            self._call_repr(value, "_repr_mimebundle_", lambda found: _merge_mime_types(bundle, found))
            for kind, method in _REPR_METHODS.items():
                if kind not in bundle and not (kind == "image/jpeg" and "image/png" in bundle):
                    self._call_repr(
                        value, method, lambda found, kind=kind: bundle.update({kind: _encode_value(found)})
                    )
        return bundle

    def _call_repr(self, value: object, name: str, use: Callable[[Any], None]) -> None:
        """Call a repr method and pass its value to `use`; looked up in the class, so proxies and mocks have none."""
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
            # The plain text is still shown, with a note about the method.
            self._write_note(f"[{type(value).__name__}.{name} failed: {type(error).__name__}: {error}]")

    # --- matplotlib -------------------------------------------------------------------------------

    def show_figures(self) -> None:
        """Show and close every open figure, in the order of their creation."""
        managers = _figure_managers()
        try:
            for manager in managers:
                bundle = _render_figure(manager.canvas.figure)
                if len(bundle) > 1:  # not an empty figure
                    self._publish(bundle)
        finally:
            if managers:
                close_figures()

    def hook_matplotlib(self) -> None:
        """Patch pyplot so that `show()` publishes figures: now, or when the program imports it."""
        if _PYPLOT in sys.modules:
            self._patch_pyplot(sys.modules[_PYPLOT])
        else:
            sys.meta_path.insert(0, _ImportHook(_PYPLOT, self._patch_pyplot))

    def _patch_pyplot(self, pyplot: ModuleType) -> None:
        bases: Any = sys.modules["matplotlib.backend_bases"]
        manager_class: Any = bases.FigureManagerBase
        make = manager_class.__init__
        numbers = itertools.count()

        def init(manager: Any, *args: Any, **kwargs: Any) -> None:
            setattr(manager, _ORDER_ATTRIBUTE, next(numbers))
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
            _remember_saved_file(figure, fname)

        figure_class.savefig = savefig
        manager_class.__init__ = init
        manager_class.show = show_one
        cast(Any, pyplot).show = show


def _figure_class() -> type | None:
    return getattr(sys.modules.get("matplotlib.figure"), "Figure", None)


def _gcf() -> Any:
    """Return pyplot's registry of open figures, or None if there are none."""
    gcf = getattr(sys.modules.get("matplotlib._pylab_helpers"), "Gcf", None)
    return gcf if gcf is not None and gcf.figs else None


def _figure_managers() -> list[Any]:
    gcf = _gcf()
    managers: list[Any] = [] if gcf is None else [*gcf.figs.values()]
    return sorted(managers, key=lambda manager: getattr(manager, _ORDER_ATTRIBUTE, -1))


def _close_figure(figure: object) -> None:
    if (gcf := _gcf()) is not None:
        gcf.destroy_fig(figure)


def close_figures() -> None:
    """Close every open figure; an interrupt may have left one half drawn."""
    if (gcf := _gcf()) is not None:
        with contextlib.suppress(Exception):
            gcf.destroy_all()
        gcf.figs.clear()


def _remember_saved_file(figure: Any, name: object) -> None:
    """Remember the file that a figure was saved to; `stale` becomes true with its next change."""
    with contextlib.suppress(Exception):
        path = os.path.abspath(cast(str, name))
        setattr(figure, _SAVED_ATTRIBUTE, (path, _file_fingerprint(os.stat(path))))
        figure.stale = False


def _file_fingerprint(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_ino, status.st_ctime_ns, status.st_size


def _read_saved_picture(figure: Any) -> MimeBundle:
    """Return the saved picture of a figure if neither has changed since.

    The figure is not drawn twice, and the display and the file are identical.
    """
    with contextlib.suppress(Exception):
        path, fingerprint = getattr(figure, _SAVED_ATTRIBUTE)
        if (
            figure.stale
            or fingerprint != _file_fingerprint(os.stat(path))
            or fingerprint[2] > output_limits.MAX_DISPLAY_BYTES // 2
        ):
            return {}
        with open(path, "rb") as file:
            content = file.read()
        for kind, start in _PICTURE_SIGNATURES.items():
            if content.startswith(start):
                return {kind: base64.b64encode(content).decode()}
    return {}


def _render_figure(figure: Any) -> MimeBundle:
    bundle = {"text/plain": repr(figure)}
    if saved := _read_saved_picture(figure):
        return bundle | saved
    if figure.axes or figure.lines or figure.texts or figure.images or figure.patches:
        buffer = io.BytesIO()
        face = figure.get_facecolor()
        figure.canvas.print_figure(buffer, format="png", dpi=figure.dpi, bbox_inches="tight", facecolor=face)
        bundle["image/png"] = base64.b64encode(buffer.getbuffer()).decode()
    return bundle


def _merge_mime_types(bundle: MimeBundle, found: object) -> None:
    if isinstance(found, dict):
        for kind, value in cast(dict[object, object], found).items():
            if value is not None:
                bundle[str(kind)] = _encode_value(value)


def _encode_value(value: object) -> str:
    """Return text as it is, bytes in base64, anything else as JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        return base64.b64encode(cast(bytes, value)).decode()
    return json.dumps(value)


def _replace_surrogates(text: str) -> str:
    """Escape lone surrogates, which the supervisor would reject."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


# --- import hooks ---------------------------------------------------------------------------------------


class _ImportHook(importlib.abc.MetaPathFinder):
    """Calls a function when one module has been imported."""

    def __init__(self, name: str, callback: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._callback = callback

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
            self._callback(module)

        cast(Any, loader).exec_module = exec_module


class _IPythonStub(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """A minimal `IPython.display`, which models import out of habit, for when IPython is not installed.

    It is the last finder, so a real IPython wins (`install_ipython_stub` gives that our `display`: without a shell it
    would only print). It creates no module before the import: libraries look into `sys.modules` for IPython.
    """

    def __init__(self, displays: DisplayPublisher) -> None:
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
            names.update(__version__="0.0.0", version_info=(0, 0, 0), get_ipython=_do_nothing)
            return
        names.update(display=self._displays.display, clear_output=_do_nothing)
        names.update({kind.__name__: kind for kind in (Image, HTML, Markdown, SVG, JSON, Latex, Math)})


def install_ipython_stub(displays: DisplayPublisher) -> None:
    """Let programs import IPython.display, real or not, and use our `display`."""

    def patch(module: ModuleType) -> None:
        vars(module).update(display=displays.display, clear_output=_do_nothing)

    sys.meta_path.insert(0, _ImportHook("IPython.display", patch))
    sys.meta_path.append(_IPythonStub(displays))


def _do_nothing(*_args: object, **_kwargs: object) -> None:
    return None


class _DisplayObject:
    """Base of IPython's display classes: data, or a file that holds it."""

    _binary = False

    def __init__(
        self, data: Any = None, url: str | None = None, filename: str | None = None, **_options: object
    ) -> None:
        if filename is None and self._binary and isinstance(data, str):
            # IPython's Image also accepts a file name or a URL as its first argument.
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


class HTML(_DisplayObject):
    def _repr_html_(self) -> Any:
        return self.data


class Markdown(_DisplayObject):
    def _repr_markdown_(self) -> Any:
        return self.data


class SVG(_DisplayObject):
    def _repr_svg_(self) -> Any:
        return self.data


class JSON(_DisplayObject):
    def _repr_json_(self) -> Any:
        return json.loads(self.data) if isinstance(self.data, str) else self.data


class Latex(_DisplayObject):
    def _repr_latex_(self) -> Any:
        return self.data


class Math(_DisplayObject):
    def _repr_latex_(self) -> str:
        return f"$\\displaystyle {str(self.data).strip('$')}$"


class Image(_DisplayObject):
    _binary = True

    def _repr_mimebundle_(self, **_options: object) -> dict[str, object]:
        data = self.data
        if data is None:
            return {"text/html": f'<img src="{self.url}"/>'} if self.url else {}
        kinds = {b"\xff\xd8": "image/jpeg", b"GI": "image/gif", b"RI": "image/webp"}
        return {kinds.get(bytes(data[:2]), "image/png"): data}
