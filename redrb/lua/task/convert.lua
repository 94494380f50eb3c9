-- Convert the next page of a plain task, so that little is left when it becomes an indexed one.
-- KEYS[1] stream
-- Returns 'more' | 'done'
--@include task facts capacity conversion

begin_writing()
if not exists() or rules().indexed then
  return 'done'
end
return convert(groups()) and 'more' or 'done'
