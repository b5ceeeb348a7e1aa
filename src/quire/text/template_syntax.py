"""What a chat template expects, read from its syntax tree."""

from jinja2 import nodes


def reads_parts(template: nodes.Template) -> bool:
    """Does it read a message's content as a list of parts, rather than as a string?

    It does if it loops over a content and asks the items for their type or text.
    """
    names = {"content"}
    grew = True
    while grew:  # names that stand for a content, and names that stand for those
        assignments = [node for node in template.find_all(nodes.Assign) if _is_content(node.node, names)]
        assigned = {node.target.name for node in assignments if isinstance(node.target, nodes.Name)}
        grew = not assigned <= names
        names |= assigned
    return any(_is_content(loop.iter, names) and _asks_items(loop) for loop in template.find_all(nodes.For))


def reads_tools(template: nodes.Template) -> bool:
    return any(node.name == "tools" for node in template.find_all(nodes.Name))


def _is_content(node: nodes.Node, names: set[str]) -> bool:
    match node:
        case nodes.Name():
            return node.name in names
        case nodes.Getattr():
            return node.attr == "content"
        case nodes.Getitem():
            return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
        case nodes.CondExpr():
            return _is_content(node.expr1, names) or (node.expr2 is not None and _is_content(node.expr2, names))
        case nodes.Filter():
            return node.node is not None and _is_content(node.node, names)
        case nodes.Or():
            return _is_content(node.left, names)
    return False


def _asks_items(loop: nodes.For) -> bool:
    if isinstance(loop.iter, nodes.Filter):
        return loop.iter.name in ("selectattr", "rejectattr")
    item = loop.target.name if isinstance(loop.target, nodes.Name) else None
    return any(_key(node, item) in ("type", "text") for node in loop.find_all((nodes.Getattr, nodes.Getitem)))


def _key(node: nodes.Node, item: str | None) -> object:
    """What `item.key` or `item["key"]` asks for."""
    match node:
        case nodes.Getattr(node=nodes.Name(name=name), attr=key) if name == item:
            return key
        case nodes.Getitem(node=nodes.Name(name=name), arg=nodes.Const(value=key)) if name == item:
            return key
    return None
