-- Count rows, bytes and changes.
-- KEYS[1] stream
-- Returns its reply
--@include task table

if not exists() then
  return cmsgpack.pack(nil)
end
local counted = numbers(task, 'change', 'run', 'bytes', 'retained_bytes', 'made', 'cleared', 'dropped',
  'limit', 'max_bytes')
local found, marked, registered = redis.call('HGETALL', marks), {}, {} -- bound: three marks
for i = 1, #found, 2 do
  marked[found[i]] = tonumber(string.match(found[i + 1], '^%d+'))
end
local claiming = redis.call('HGETALL', key('claims')) -- bound: PAGE.claims
for i = 1, #claiming, 2 do
  local claim = cmsgpack.unpack(claiming[i + 1])
  registered[claiming[i]] = {columns = claim.columns, size = claim.size,
    consumed = redis.call('ZCARD', key('consumed', claiming[i]))}
end
return cmsgpack.pack({rows = redis.call('HLEN', keys), retained = redis.call('ZCARD', cleared),
  change = counted[1], run = counted[2], bytes = counted[3], retained_bytes = counted[4], made = counted[5],
  cleared = counted[6], dropped = counted[7], limit = counted[8], max_bytes = counted[9],
  retain = redis.call('HGET', task, 'retain') or '', trash = redis.call('SCARD', trash),
  columns = redis.call('HKEYS', columns), marks = next(marked) and marked,
  claims = next(registered) and registered, left = not has_table()}) -- bound: PAGE.columns
