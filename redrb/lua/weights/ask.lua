-- Ask the publisher for a full version, because a reader has found a version damaged; unless a later version
-- has replaced it.
-- KEYS[1] versions
-- ARGV    the call `Ask` of redrb/weights/wire/calls.py
-- Returns whether the publisher is asked; repeated, it asks once more
--@include weights permissions

check_permissions(asked)
begin_writing()
local ask, last = cmsgpack.unpack(ARGV[1]), newest()
local damaged = at(ask.version)
local is_adapter = damaged and damaged.kind == 'lora'
local later = is_adapter and last.version or tonumber(redis.call('ZREVRANGE', fulls, 0, 0)[1] or '0')
if not last or later > ask.version then
  return cmsgpack.pack(false)
end
redis.call('DEL', asked)
redis.call('XADD', asked, '*', 'version', string.format('%.0f', ask.version),
  'kind', is_adapter and 'lora' or 'full', 'key', ask.key)
return cmsgpack.pack(true)
