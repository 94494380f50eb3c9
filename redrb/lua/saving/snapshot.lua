-- Read a task without its groups in order to save it. Writes nothing.
-- KEYS[1] stream
-- Returns the reply of the call `ReadTask` of redrb/stream/saving/calls.py
--@include task settings ledger pending unrecorded

if not exists() then
  return cmsgpack.pack({exists = false})
end
check_puts()
local newest = redis.call('XREVRANGE', key('dead'), '+', '-', 'COUNT', 1)[1]
local fields, found = task_fields() or {}, {}
for _, name in ipairs(PUT_COUNTERS) do
  fields[name] = string.format('%d', number(puts, name))
end
for i, group in ipairs(groups()) do
  local staleness
  -- bound: stalenesses, 4 * (MOST_STALENESS + 1)
  local flat = redis.call('HGETALL', key('staleness', group))
  for at = 1, #flat, 2 do -- bound: the same
    staleness = staleness or {}
    staleness[flat[at]] = flat[at + 1]
  end
  found[i] = {name = group, counters = ledger_of(group), leased = count_leased(group), staleness = staleness}
end
return cmsgpack.pack({exists = true, fields = fields, newest_letter = newest and newest[1] or '',
  groups = found})
