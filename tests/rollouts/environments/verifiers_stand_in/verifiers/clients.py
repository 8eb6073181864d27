"""The client that a model is asked through."""

from abc import ABC, abstractmethod


class Client(ABC):
    def __init__(self, client_or_config):
        self._client = client_or_config

    @abstractmethod
    def setup_client(self, config): ...
    @abstractmethod
    async def to_native_tool(self, tool): ...
    @abstractmethod
    async def to_native_prompt(self, messages): ...
    @abstractmethod
    async def get_native_response(self, prompt, model, sampling_args, tools=None, **kwargs): ...
    @abstractmethod
    async def raise_from_native_response(self, response): ...
    @abstractmethod
    async def from_native_response(self, response): ...
    @abstractmethod
    async def close(self): ...

    async def get_response(self, prompt, model, sampling_args, tools=None, **kwargs):
        native, extra = await self.to_native_prompt(prompt)
        response = await self.get_native_response(native, model, sampling_args, tools, **extra, **kwargs)
        await self.raise_from_native_response(response)
        return await self.from_native_response(response)
