"""Messages and responses."""


class _Fields:
    def __init__(self, **fields):
        vars(self).update(fields)


class ToolCall(_Fields):
    pass


class ResponseMessage(_Fields):
    pass


class Response(_Fields):
    pass


class Message:
    """Attributes and items, as the package's messages have."""

    def __init__(self, fields):
        self._fields = dict(vars(fields)) if hasattr(fields, "__dict__") else dict(fields)
        self.role, self.content = self._fields["role"], self._fields.get("content")

    def __getitem__(self, key):
        return self._fields[key]

    def model_dump(self, exclude_none=False):
        return {key: value for key, value in self._fields.items() if value is not None or not exclude_none}


def message(fields):
    return fields if isinstance(fields, Message) else Message(fields)
