-- The kind of a task's groups: fields and dtypes of the completed groups that were put first, as a text.
--@include task

-- Whether the task has another kind; no put is refused for the kind ''.
local function has_other_kind(kind)
  return kind ~= '' and (redis.call('HGET', task, 'kind') or kind) ~= kind
end

local function remember_kind(kind)
  if kind ~= '' then
    redis.call('HSET', task, 'kind', kind)
  end
end
