-- Commit a prepared version, which is the newest then, and delete versions that are no longer kept.
-- KEYS[1] versions
-- ARGV    the call `Commit` of redrb/weights/wire/calls.py
-- Returns its reply: weights/trim goes on with its page; repeated, it changes nothing more and returns the
--         same time
--@include weights retention permissions

check_permissions(pins)
check_keys()
begin_writing()
local ask, manifest = cmsgpack.unpack(ARGV[1]), ARGV[2]
local token, version, kind, base = ask.token, ask.version, ask.kind, ask.base
local field, is_adapter = string.format('%.0f', version), kind == 'lora'

local last = newest()
local earlier = at(version)
if earlier and earlier.token == token and redis.call('HGET', manifests, field) == manifest then
  -- the caller trims, if it is the owner yet
  return cmsgpack.pack({outcome = 'ok', created_ms = earlier.created_ms, more = true})
end
if not is_owner(ask.owner) then
  return cmsgpack.pack({outcome = 'fenced'})
end
if redis.call('HGET', fence, 'owner') ~= ask.owner or redis.call('HGET', fence, 'token') ~= token
    or not redis.call('HGET', attempts, token) then
  -- or the server lost its data, or its last second, before it was restarted
  return cmsgpack.pack({outcome = 'gone'})
end
if last and last.version >= version then
  return cmsgpack.pack({outcome = 'stale', newest = last.version})
end

local anchor = kind == 'full' and version or 0
if base > 0 then
  local stands_on = is_adapter and at(base) or newest_state()
  if not stands_on or stands_on.version ~= base or stands_on.kind == 'lora' then
    return cmsgpack.pack({outcome = 'base'})
  end
  anchor = anchor > 0 and anchor or stands_on.anchor
end

if not last then
  redis.call('UNLINK', loads, fulls)
  redis.call('HSET', fence, 'first', field)
  last = {ordinal = 0, all_bytes = 0, state_bytes = 0}
end
local created_ms = string.format('%.0f', server_ms())
redis.call('HSET', manifests, field, manifest)
redis.call('XADD', versions, field .. '-0', 'kind', kind, 'token', token,
  'base', string.format('%.0f', base), 'anchor', string.format('%.0f', anchor), 'nbytes', ask.nbytes,
  'stored', string.format('%.0f', ask.stored), 'delta', ask.delta, 'names', ask.names,
  'created_ms', created_ms, 'full', ask.full, 'pieces', ask.pieces,
  'ordinal', string.format('%.0f', last.ordinal + 1),
  'all_bytes', string.format('%.0f', last.all_bytes + ask.stored),
  'state_bytes', string.format('%.0f', last.state_bytes + (is_adapter and 0 or ask.stored)))
redis.call('ZADD', loads, is_adapter and base or version, field)
if kind == 'full' then
  redis.call('ZADD', fulls, version, field)
end
if kind == 'full' or asked_kind() == kind then
  redis.call('DEL', asked)
end
redis.call('HDEL', attempts, token)
local reply = trim(ask.keep, ask.max_bytes, '0-0')
reply.outcome, reply.created_ms = 'ok', created_ms
return cmsgpack.pack(reply)
