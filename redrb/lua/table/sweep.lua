-- Delete cleared rows that no mark needs any more, a page at a time.
-- KEYS[1] stream
-- ARGV    the call `Sweep` of redrb/table/calls.py
-- Returns its reply, a page
--@include task table runs permissions

check_permissions(gone)
begin_writing()
local ask = cmsgpack.unpack(ARGV[1])
local refused = refusal(ask)
if refused then
  return cmsgpack.pack(refused)
end
local before = '(' .. (redis.call('HGET', task, 'kept_from') or '-1')
local numbered = redis.call('ZRANGEBYSCORE', cleared, '-inf', before, 'LIMIT', 0, PAGE.table_rows)
if #numbered > 0 then
  for _, name in ipairs(redis.call('HKEYS', key('claims'))) do -- bound: PAGE.claims
    in_parts('ZREM', key('spent', name), numbered)
  end
  in_parts('ZREM', cleared, numbered)
  add(task, 'retained_bytes', -delete_rows(numbered, records_of(numbered)))
end
return cmsgpack.pack({outcome = 'ok', more = #numbered == PAGE.table_rows})
