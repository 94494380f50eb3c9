-- Give a table its complete index, which was built under other keys: all of it, or nothing.
-- KEYS[1] stream
-- ARGV    the call `EndResume` of redrb/table/calls.py
-- Returns "ok"; "used": there is a table; or "gone": the index is not complete, or another process resumes
--         the table or has deleted it. Repeated, it says "ok".
--@include task table permissions

check_permissions(gone)
begin_writing()
local ask = cmsgpack.unpack(ARGV[1])
if has_table() then
  return cmsgpack.pack(redis.call('HGET', task, 'incarnation') == ask.fields.incarnation and 'ok' or 'used')
end
if redis.call('HGET', task, 'left') ~= ask.token or redis.call('HLEN', ask.area .. 'rows') ~= ask.rows
  or redis.call('HLEN', ask.area .. 'keys') ~= ask.there
  or redis.call('ZCARD', ask.area .. 'changes') ~= ask.there
  or redis.call('ZCARD', ask.area .. 'cleared') ~= ask.rows - ask.there then
  return cmsgpack.pack('gone')
end
for _, name in ipairs(ask.names) do -- bound: PAGE.claims
  if redis.call('EXISTS', ask.area .. name) == 1 then
    redis.call('RENAME', ask.area .. name, prefix .. name)
    redis.call('PERSIST', prefix .. name)
  end
end
redis.call('HDEL', task, 'left')
for name, value in pairs(ask.fields) do
  redis.call('HSET', task, name, value)
end
return cmsgpack.pack('ok')
