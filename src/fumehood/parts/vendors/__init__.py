"""The vendors, by the names they are asked for; imports its modules."""

from fumehood.parts.vendors import openai

VENDORS = {vendor.name: vendor for vendor in (openai.VENDOR,)}
