-- Tell a task the newest weight version, and wake makers that may begin groups now.
-- KEYS[1] stream
-- ARGV    the call `Advance` of redrb/weights/wire/calls.py
-- Returns its reply
--@include task facts permissions

check_permissions(KEYS[1])
begin_writing()
if not exists() then
  return cmsgpack.pack(-1)
end
local ask, known = cmsgpack.unpack(ARGV[1]), rules().version
local version = math.max(number(task, 'version'), ask.version)
local admits = rules().groups_per_version and version ~= known
if admits then
  --@include versions
  advance_mark(version)
end
redis.call('HSET', task, 'version', string.format('%.0f', version))
if admits and redis.call('EXISTS', key('queue', '#admission')) == 1 then
  --@include admission
  rules().version = version
  wake_rights()
end
return cmsgpack.pack(version)
