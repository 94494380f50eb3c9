-- Register a task that claims rows, and let those arrive that are complete already, a page at a time.
-- KEYS[1] stream
-- ARGV    the call `Register` of redrb/table/calls.py; the front and the back of its groups
-- Returns its reply
--@include table claims permissions

check_permissions(KEYS[1])
begin_writing()
local ask = cmsgpack.unpack(ARGV[1])
if redis.call('HGET', task, 'incarnation') ~= ask.incarnation then
  return cmsgpack.pack({outcome = 'gone'})
end
local stored = redis.call('HGET', key('claims'), ask.task)
local known = stored and cmsgpack.unpack(stored)
if not known then
  if redis.call('HLEN', key('claims')) >= PAGE.claims then
    return cmsgpack.pack({outcome = 'claims'})
  end
  known = {columns = ask.columns, size = ask.size, at = 0, last = number(task, 'number'), front = ARGV[2],
    back = ARGV[3]}
elseif ask.size ~= known.size or table.concat(ask.columns, '\0') ~= table.concat(known.columns, '\0') then
  return cmsgpack.pack({outcome = 'differs', columns = known.columns, size = known.size})
end
if known.at < known.last then
  local numbered, row_keys, found = {}, {}, {}
  for number_of = known.at + 1, math.min(known.at + PAGE.table_rows, known.last) do -- bound: PAGE.table_rows
    numbered[#numbered + 1] = number_of
  end
  local records, packed = records_of(numbered), replies_of('HMGET', tags, numbered)
  for i in ipairs(numbered) do
    found[i] = packed[i] and cmsgpack.unpack(packed[i])[''] or ''
  end
  for i, number_of in ipairs(replies_of('HMGET', keys, found)) do -- cleared rows are retained without one
    row_keys[i] = tonumber(number_of or '0') == numbered[i] and found[i]
  end
  local complete, complete_keys = complete_for(known, column_ids(), numbered, row_keys, records)
  if #complete > 0 then
    arrive(ask.task, known, complete, complete_keys)
  end
  known.at = numbered[#numbered]
end
redis.call('HSET', table_prefix .. 'claims', ask.task, cmsgpack.pack(known))
return cmsgpack.pack({outcome = 'ok', columns = known.columns, size = known.size, more = known.at < known.last})
